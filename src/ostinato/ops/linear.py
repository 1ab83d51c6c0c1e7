"""linear: y = x W^T + b, with what a layer does to its outputs: scale, activation, residual."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from ostinato.ops import int8
from ostinato.ops.activations import ACTIVATIONS
from ostinato.ops.blocks import dequantize as in_blocks
from ostinato.ops.blocks.formats import Blocks
from ostinato.ops.sizes import DEQUANT_SLAB


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    blocks: Blocks | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation((x W^T + bias) * scale) + residual.

    `x` [tokens, in] and `weight` [out, in] in one dtype, `bias` [out]; `scale` [out] float32; `activation` is one of
    `ops.activations`; with those of `results.GATED` the first half of the outputs are the gates and the result has half
    as many.
    `residual` is as the result: [tokens, out or out / 2], in the dtype of `x` or in `out_dtype` where that is given.
    With `weight_scale` float32 [out] or [out, groups], `weight` is int8 (see `ops.int8`), and multiplied exactly.
    With `blocks`, `weight` is uint8, its rows one behind the other in these formats (see `ops.blocks`), and multiplied
    exactly too. `order` int32 [in] says which input each element of a row belongs to; without it, its own.
    """
    if order is not None:
        x = x.index_select(1, order)
    if blocks is not None:
        y = _product(x, in_blocks.slabs(weight, blocks, x.shape[1]), bias)
    elif weight_scale is None:
        y = F.linear(x, weight, bias)
    else:
        y = _quantized_product(x, weight, weight_scale, group_size, bias)
    if out_dtype is not None:
        y = y.to(out_dtype)
    if scale is not None:
        y.mul_(scale)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y.add_(residual)


def _quantized_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    group_size: int | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x W^T + bias in the dtype of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = max(1, DEQUANT_SLAB // weight.shape[1])
    parts = zip(weight.split(rows), weight_scale.to(wide).split(rows), strict=True)
    return _product(x, (int8.dequantize(slab, scale, group_size) for slab, scale in parts), bias)


def _product(x: torch.Tensor, slabs: Iterable[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias in the dtype of `x`; computed in float32 at least, a slab of rows at a time."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.cat([F.linear(x.to(wide), slab.to(wide)) for slab in slabs], dim=1)
    return (y if bias is None else y + bias).to(x.dtype)
