"""Quantisation to 4 bits: for each group of elements of a row a scale, a zero point and integers from 0 to 15.

A weight is scale * (integer - zero point). The range of a group includes 0, which the zero point represents exactly.
`ops/blocks/dequantize.py` defines the layout: formats `int4_g32`, `int4_g64` and `int4_g128`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ostinato.ops.blocks.dequantize import ZERO_BITS, pack_int4
from ostinato.ops.sizes import INT4_SHRINK, INT4_STEPS

MAX_INT4 = 15
INT4_SLAB = 2**18
"""Values that torch quantises in one call."""

QuantizeInt4 = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Function (values [rows, in], weight uint8 [rows, bytes of a row], group size) -> None.

It writes the result of `quantize_int4` for the values into the weight's blocks.
"""


def quantize_int4(values: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise `values` [rows, in] -> integers uint8 [rows, in]; scales float32 and zero points uint8, [rows, groups].

    It tries `INT4_STEPS` scales. The first spans a group's range; each of the others spans less, so that more of the
    largest values are cut off. Each is replaced by the scale that fits its integers best (least squares: sum(v q) /
    sum(q^2) for values v and integers q less the zero point). The scale with the least squared error is used, and the
    values are rounded with it once more. A scale leaves the bits of the zero point free. A group with a value that is
    not finite has a scale that is not finite.
    """
    v = values.float().unflatten(1, (-1, group_size))
    low, high = v.amin(dim=-1, keepdim=True).clamp(max=0), v.amax(dim=-1, keepdim=True).clamp(min=0)
    span = (high - low) / MAX_INT4
    divisor = torch.where(span > 0, span, 1.0)
    zero = (-low / divisor).round_()
    best, scale = torch.zeros_like(span), span
    for step in range(INT4_STEPS):
        q = _rounded(v, divisor * ((100 - INT4_SHRINK * step) / 100), zero)
        fit, size = (v * q).sum(dim=-1, keepdim=True), (q * q).sum(dim=-1, keepdim=True)
        # The squared error is sum(v^2) less this.
        gain = fit * fit / torch.where(size > 0, size, 1.0)
        scale = torch.where(gain > best, fit / size, scale)
        best = torch.maximum(best, gain)
    is_finite = span.isfinite()
    scale = torch.where(is_finite, _with_room(scale), torch.nan)
    whole = _rounded(v, torch.where(scale > 0, scale, 1.0), zero).add_(zero)
    whole, zero = (torch.where(is_finite, each, 0.0).to(torch.uint8) for each in (whole, zero))
    return whole.flatten(1), scale.squeeze(-1), zero.squeeze(-1)


def quantize_int4_into(values: torch.Tensor, weight: torch.Tensor, group_size: int) -> None:
    """Quantise by torch on the device of `weight`, as a `QuantizeInt4` function.

    It takes several times the memory of its values, so it works in slabs of rows.
    """
    rows = max(1, INT4_SLAB // max(1, values.shape[1]))
    for begin in range(0, len(values), rows):
        slab = values[begin : begin + rows].to(weight.device)
        weight[begin : begin + rows] = pack_int4(*quantize_int4(slab, group_size))


def native_quantize_int4(extension: Any) -> QuantizeInt4:
    """Return a `QuantizeInt4` function that calls an extension's kernel, which reads the values once and in place."""

    def quantize_by_kernel(values: torch.Tensor, weight: torch.Tensor, group_size: int) -> None:
        if values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            values = values.float()
        named = {"values": values, "weight": weight.view(torch.int8), "group_size": group_size}
        extension.quantize_int4(len(values), named)

    return quantize_by_kernel


def _rounded(v: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return the integers less the zero point."""
    whole = (v / scale).round_().add_(zero).clamp_(0, MAX_INT4)
    return whole.sub_(zero)


def _with_room(scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest number whose bits for the zero point are 0."""
    return ((scale.view(torch.int32) + (ZERO_BITS + 1) // 2) & ~ZERO_BITS).view(torch.float32)
