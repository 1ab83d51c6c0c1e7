"""multiply: two vectors of each token, element by element."""

from __future__ import annotations

import torch


def multiply(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Multiply `first` and `second` [tokens, size], in one dtype -> [tokens, size], each product rounded once."""
    return first * second
