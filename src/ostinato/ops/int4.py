"""4-bit weights made of others: for each group of elements of a row a scale, a zero point and integers from 0 to 15.

A weight is scale * (integer - zero point). The range of a group includes 0, which the zero point stands for exactly.
The last group of a row has fewer elements where `group_size` does not divide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ostinato.ops.int8 import grouped, num_groups
from ostinato.ops.sizes import INT4_SHRINK, INT4_STEPS

LARGEST = 15
SLAB = 2**18
"""Values that torch quantises at a time."""

Integers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""int8 [rows, in], 0 to 15; scale float32 [rows, groups], each a number of 16 bits (float16); zero point int8 [rows,
groups], 0 to 15"""

Quantize = Callable[[torch.Tensor, int], Integers]
"""(values [rows, in], group size) -> what `quantize` makes of them."""


def quantize(values: torch.Tensor, group_size: int) -> Integers:
    """Integers and scales with a small squared error.

    Of `INT4_STEPS` scales, the first of which spans a group's range and each of the others less of it, so that more of
    the largest values are cut off, every one is replaced by that which fits its integers best (least squares:
    sum(v q) / sum(q^2) for values v and integers q less the zero point). That with the least squared error is taken,
    and the values are rounded with it once more. A group with a value that is not finite has a scale that is not.
    """
    v = grouped(values.float(), group_size)
    low, high = v.amin(dim=-1, keepdim=True).clamp(max=0), v.amax(dim=-1, keepdim=True).clamp(min=0)
    span = (high - low) / LARGEST
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
    scale = torch.where(span.isfinite(), scale, torch.nan).half().float()
    whole = _rounded(v, torch.where(scale > 0, scale, 1.0), zero) + zero
    whole = whole.nan_to_num(0.0).to(torch.int8).flatten(1)[:, : values.shape[1]].contiguous()
    return whole, scale.squeeze(-1), zero.nan_to_num(0.0).to(torch.int8).squeeze(-1)


def quantize_in_slabs(values: torch.Tensor, group_size: int) -> Integers:
    """`Quantize` by torch, which takes several times the memory of its values: so a slab of rows after the other."""
    rows = max(1, SLAB // max(1, values.shape[1]))
    made = [quantize(slab, group_size) for slab in values.split(rows)]
    whole, scale, zero = (torch.cat(parts) for parts in zip(*made, strict=True))
    return whole, scale, zero


def native_quantize(extension: Any) -> Quantize:
    """`Quantize` by the kernel of an extension, which reads the values once, where they lie."""

    def quantize_by_kernel(values: torch.Tensor, group_size: int) -> Integers:
        if values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            values = values.float()
        rows, groups = len(values), num_groups(values.shape[1], group_size)
        weight = torch.empty(values.shape, dtype=torch.int8)
        scale, zero = torch.empty(rows, groups), torch.empty(rows, groups, dtype=torch.int8)
        named = {"values": values, "weight": weight, "scale": scale, "zero": zero, "group_size": group_size}
        extension.quantize_int4(rows, named)
        return weight, scale, zero

    return quantize_by_kernel


def dequantize(whole: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int) -> torch.Tensor:
    """What `quantize` gives -> float32 [rows, in]"""
    columns = whole.shape[1]
    spread = [each.repeat_interleave(group_size, dim=1)[:, :columns] for each in (scale, zero)]
    return spread[0] * (whole - spread[1])


def _rounded(v: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Integers less the zero point."""
    whole = (v / scale).round_().add_(zero).clamp_(0, LARGEST)
    return whole.sub_(zero)
