"""linear: y = x W^T + b, with what a layer does to its outputs: scale, activation, residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.activations import ACTIVATIONS
from ostinato.ops.native import DTYPES, Lowered, check_rows

CODES = {None: 0, "relu2": 1, "silu": 2, "swiglu": 3}
"""Activations, as in native/kernels/linear.cpp."""


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


def lower(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
) -> Lowered:
    """As the reference."""
    check_rows("linear", x, weight)
    tokens, (out_size, in_size) = x.shape[0], weight.shape
    result_size = out_size // 2 if activation == "swiglu" else out_size
    out = torch.empty(tokens, result_size, dtype=out_dtype or x.dtype) if out is None else out
    return out, (
        tokens,
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        0,
        0,
        0 if bias is None else bias.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        out.stride(0),
        in_size,
        out_size,
        CODES[activation],
        DTYPES[x.dtype],
        DTYPES[weight.dtype],
        DTYPES[out.dtype],
    )
