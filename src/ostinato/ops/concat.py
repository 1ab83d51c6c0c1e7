"""concat: two vectors of each token, one behind the other."""

from __future__ import annotations

import torch


def reference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`first` [tokens, a], `second` [tokens, b] in one dtype -> [tokens, a + b]"""
    return torch.cat((first, second), dim=-1)
