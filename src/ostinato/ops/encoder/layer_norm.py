"""layer_norm: normalisation to mean 0 and variance 1 over the last dimension (Ba et al. 2016, arXiv 1607.06450)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias.

    `x` [tokens, size], `weight` and `bias` [size] in one dtype -> [tokens, size]; computed in float32.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
