"""rms_norm: root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, eq. 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., size], `weight` [size] -> [..., size] in the dtype of `weight`; the mean is taken in float32."""
    size = (x.shape[-1],)
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, size, weight, eps)
    return F.rms_norm(x.float(), size, weight.float(), eps).to(weight.dtype)
