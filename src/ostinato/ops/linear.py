"""linear: y = x W^T + b."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [tokens, in], `weight` [out, in], `bias` [out] -> [tokens, out], all in the dtype of `weight`."""
    return F.linear(x, weight, bias)
