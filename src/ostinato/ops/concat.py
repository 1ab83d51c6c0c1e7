"""concat: two vectors of each token, concatenated."""

from __future__ import annotations

import torch


def concat(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Concatenate `first` [tokens, a] and `second` [tokens, b], in one dtype -> [tokens, a + b]."""
    return torch.cat((first, second), dim=-1)
