"""rms_norm: root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, eq. 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise `x` [..., size] by its root mean square and multiply by `weight` [size] plus `offset`.

    -> [..., size] in the dtype of `weight`; the mean is taken in float32. `offset` and weight are added in float32:
    Gemma and Qwen3-Next store the weight less 1. `residual`, which has the result's shape, is added last.
    """
    size = (x.shape[-1],)
    if x.dtype == weight.dtype == torch.float32:
        y = F.rms_norm(x, size, weight + offset if offset else weight, eps)
        return y if residual is None else y + residual
    y = F.rms_norm(x.float(), size, weight.float() + offset, eps)
    return (y if residual is None else y + residual.float()).to(weight.dtype)
