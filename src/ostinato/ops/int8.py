"""8-bit weights: integers from -127 to 127, and a float32 scale for each row or each group of elements of one.

`group_size` is the number of elements in a group, the last of a row having fewer where that does not divide it; None:
the row. Scales are [rows], or [rows, groups].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

LARGEST = 127
SLAB = 2**19
"""Values that torch quantises at a time."""

Quantize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], None]
"""(values [rows, in], weight int8 [rows, in], scale, group size): writes what `quantize` makes of the values into the
weight and its scale."""


def num_groups(in_size: int, group_size: int) -> int:
    return -(-in_size // group_size)


def quantize(values: torch.Tensor, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` [rows, in] -> int8 [rows, in] and scales: the largest magnitude becomes 127, the rest is rounded to the
    nearest, so that the error is at most half a scale."""
    grouped = _grouped(values.float(), group_size)
    scale = grouped.abs().amax(dim=-1, keepdim=True) / LARGEST
    whole = (grouped / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    whole = whole.flatten(1)[:, : values.shape[1]].contiguous()
    return whole, scale.squeeze(-1) if group_size is not None else scale.view(-1)


def quantize_into(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group_size: int | None) -> None:
    """`Quantize` by torch, on the device of `weight`. It takes several times the memory of its values, so it does a
    slab of rows after the other."""
    rows = max(1, SLAB // max(1, values.shape[1]))
    for begin in range(0, len(values), rows):
        end = begin + rows
        weight[begin:end], scale[begin:end] = quantize(values[begin:end].to(weight.device), group_size)


def native_quantize(extension: Any) -> Quantize:
    """`Quantize` by the kernel of an extension, which reads the values once, where they lie."""

    def quantize_by_kernel(
        values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group_size: int | None
    ) -> None:
        if values.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            values = values.float()
        named = {"values": values, "weight": weight, "scale": scale, "group_size": group_size}
        extension.quantize(len(values), named)

    return quantize_by_kernel


def dequantize(weight: torch.Tensor, scale: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """`weight` int8 [rows, in] and its scales -> [rows, in] in the dtype of the scales."""
    if group_size is None:
        return weight * scale[:, None]
    spread = scale.repeat_interleave(group_size, dim=1)[:, : weight.shape[1]]
    return weight * spread


def _grouped(values: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """[rows, in] -> [rows, groups, group_size], zeros behind the last element."""
    if group_size is None:
        return values.unsqueeze(1)
    missing = num_groups(values.shape[1], group_size) * group_size - values.shape[1]
    return F.pad(values, (0, missing)).unflatten(1, (-1, group_size))
