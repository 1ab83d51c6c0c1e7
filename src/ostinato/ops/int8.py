"""8-bit weights: integers from -127 to 127, with a float32 scale per row or per group of elements of a row.

`group_size` is the number of elements in a group; the last group of a row is smaller if that does not divide the row.
None means one scale per row. Scales are [rows], or [rows, groups].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

MAX_INT8 = 127
INT8_SLAB = 2**19
"""Values that torch quantises in one call."""

QuantizeInt8 = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], None]
"""Function (values [rows, in], weight int8 [rows, in], scale, group size) -> None.

It writes the result of `quantize_int8` for the values into the weight and its scale.
"""


def num_groups(in_size: int, group_size: int) -> int:
    return -(-in_size // group_size)


def quantize_int8(values: torch.Tensor, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `values` [rows, in] -> int8 [rows, in] and scales.

    The largest magnitude becomes 127 and the rest is rounded to nearest, so the error is at most half a scale.
    """
    grouped = _grouped(values.float(), group_size)
    scale = grouped.abs().amax(dim=-1, keepdim=True) / MAX_INT8
    whole = (grouped / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
    whole = whole.flatten(1)[:, : values.shape[1]].contiguous()
    return whole, scale.squeeze(-1) if group_size is not None else scale.view(-1)


def quantize_int8_into(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group_size: int | None) -> None:
    """Quantise by torch on the device of `weight`, as a `QuantizeInt8` function.

    It takes several times the memory of its values, so it works in slabs of rows.
    """
    rows = max(1, INT8_SLAB // max(1, values.shape[1]))
    for begin in range(0, len(values), rows):
        end = begin + rows
        weight[begin:end], scale[begin:end] = quantize_int8(values[begin:end].to(weight.device), group_size)


def native_quantize_int8(extension: Any) -> QuantizeInt8:
    """Return a `QuantizeInt8` function that calls an extension's kernel, which reads the values once and in place."""

    def quantize_by_kernel(
        values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group_size: int | None
    ) -> None:
        if values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            values = values.float()
        named = {"values": values, "weight": weight, "scale": scale, "group_size": group_size}
        extension.quantize(len(values), named)

    return quantize_by_kernel


def dequantize(weight: torch.Tensor, scale: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """Return the values of `weight` int8 [rows, in] with its scales, [rows, in] in the dtype of the scales."""
    if group_size is None:
        return weight * scale[:, None]
    spread = scale.repeat_interleave(group_size, dim=1)[:, : weight.shape[1]]
    return weight * spread


def _grouped(values: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """Split [rows, in] into [rows, groups, group_size], padding the last group with zeros."""
    if group_size is None:
        return values.unsqueeze(1)
    missing = num_groups(values.shape[1], group_size) * group_size - values.shape[1]
    return F.pad(values, (0, missing)).unflatten(1, (-1, group_size))
