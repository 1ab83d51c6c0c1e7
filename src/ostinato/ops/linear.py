"""linear: y = x W^T + b, with what a layer does to its outputs: scale, activation, residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.activations import ACTIVATIONS


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """activation((x W^T + bias) * scale) + residual.

    `x` [tokens, in] and `weight` [out, in] in one dtype, `bias` [out]; `scale` [out] float32; `activation` is `silu`,
    `relu2` or `swiglu`, with which the first half of the outputs are the gates and the result has half as many.
    `residual` is as the result: [tokens, out or out / 2], in the dtype of `x` or in `out_dtype` where that is given.
    """
    y = F.linear(x, weight, bias)
    if out_dtype is not None:
        y = y.to(out_dtype)
    if scale is not None:
        y.mul_(scale)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y.add_(residual)
