"""Quantised weights of checkpoints as numbers: float8, and 4-bit ones of compressed-tensors, GPTQ and AWQ.

A 4-bit weight is scale * (integer - zero point), with one scale and zero point for a group of elements of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ostinato.errors import ModelError
from ostinato.formats import awq
from ostinato.plan.quantization import StoredWeights


def expanded(
    stored: StoredWeights, weight: torch.Tensor, scale: torch.Tensor, begin: int, columns: int
) -> torch.Tensor:
    """Return rows of a float8 matrix times their scales, as float32 [rows, columns].

    `weight` [rows, columns] begins at row `begin` of the matrix. `scale` is of the whole matrix: one number, one for
    each row, or one for each block.
    """
    return weight.float() * scales(stored, scale, begin, begin + len(weight), columns, 1)


def scales(
    stored: StoredWeights, scale: torch.Tensor, begin: int, end: int, columns: int, elements: int
) -> torch.Tensor:
    """Return the scales of the rows `begin` to `end` of a matrix, float32 [rows, columns / elements].

    Each `elements` of a row with `columns` elements share a scale.
    """
    scale, count = scale.float(), columns // elements
    if scale.numel() == 1:
        return scale.view(1, 1).expand(end - begin, count)
    rows = torch.arange(begin, end)
    if stored.block is None or stored.block == (0, 0):
        return scale.view(-1, 1)[rows].expand(-1, count)
    high, wide = stored.block
    return scale[(rows // high)[:, None], torch.arange(count) * elements // wide]


Parts = Mapping[str, torch.Tensor]
"""Tensors that hold one weight, by the format's names for them."""

MIDDLE = 8
"""Zero point of symmetric weights."""
ROW_MULTIPLE = 8
"""Number of rows whose zero points are in one int32, so that rows are unpacked in multiples of it."""


@dataclass(frozen=True)
class UnpackedInt4:
    """Some rows of a matrix, unpacked."""

    integers: torch.Tensor
    """Stored integers, uint8 [rows, in], 0 to 15."""
    scale: torch.Tensor
    """Scales, float32 [rows, groups]."""
    zero: torch.Tensor
    """Zero points, uint8 [rows, groups], 0 to 15."""

    def dequantized(self, group_size: int | None, group_of: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weights, [rows, in] float32.

        `group_of` int64 [in] is the group of each element, if the elements of a group are not neighbours.
        """
        columns = self.integers.shape[1]
        if group_of is None:
            size = columns if group_size is None else group_size
            scale, zero = (each.repeat_interleave(size, dim=1)[:, :columns] for each in (self.scale, self.zero))
        else:
            scale, zero = self.scale[:, group_of], self.zero[:, group_of]
        # The difference of two small integers is exact, so only the product is rounded.
        return scale * (self.integers.to(torch.int8) - zero.to(torch.int8))


def unpack(stored: StoredWeights, parts: Parts, begin: int, end: int, columns: int) -> UnpackedInt4:
    """Unpack the rows `begin`, a multiple of `ROW_MULTIPLE`, to `end` of a weight with `columns` elements per row."""
    unpacker = _compressed_tensors if stored.method == "compressed-tensors" else _columns_first
    return unpacker(stored, parts, begin, end, columns)


def group_index(stored: StoredWeights, parts: Parts, name: str, columns: int) -> torch.Tensor | None:
    """Return the group of each element of a row, int64 [columns]; None if the elements of a group are neighbours.

    Raises ModelError if a checkpoint has an order that its config does not mention, or groups without scales.
    """
    index = parts.get("g_idx", parts.get("weight_g_idx"))
    if index is None or stored.group_size is None:
        return None
    groups = -(-columns // stored.group_size)
    index = index.long()
    if torch.equal(index, torch.arange(columns) // stored.group_size) or (index == -1).all():
        return None
    if not stored.in_groups_by_index:
        raise ModelError(
            f"the groups of {name} are in an order of their own, though config.json says that they are not (desc_act "
            "or actorder)"
        )
    if int(index.min()) < 0 or int(index.max()) >= groups:
        first, last = int(index.min()), int(index.max())
        raise ModelError(f"{name} has elements in groups {first} to {last}; it has scales for {groups}")
    return index


def _compressed_tensors(stored: StoredWeights, parts: Parts, begin: int, end: int, columns: int) -> UnpackedInt4:
    scale = parts["weight_scale"][begin:end].float()
    if stored.has_zeros:
        packed = parts["weight_zero_point"][begin // ROW_MULTIPLE : -(-end // ROW_MULTIPLE)]
        zero = _nibbles(packed.t()).flatten(1).t()[: end - begin]
    else:
        zero = torch.full_like(scale, MIDDLE, dtype=torch.uint8)
    integers = _nibbles(parts["weight_packed"][begin:end]).flatten(1)[:, :columns]
    return UnpackedInt4(integers, scale, zero)


def _columns_first(stored: StoredWeights, parts: Parts, begin: int, end: int, columns: int) -> UnpackedInt4:
    """Unpack GPTQ's or AWQ's tensors, which have inputs for rows and outputs for columns."""
    some = slice(begin // ROW_MULTIPLE, -(-end // ROW_MULTIPLE))
    scale = parts["scales"][:, begin:end].t().float()
    zero = _nibbles(parts["qzeros"][:, some])
    if stored.method == "awq":
        packed = _in_awq_order(_nibbles(parts["qweight"][:, some]))
        integers = packed.flatten(1).t()[: end - begin]
        return UnpackedInt4(integers.contiguous(), scale, _in_awq_order(zero).flatten(1).t()[: end - begin])
    packed = _nibbles(parts["qweight"][:, begin:end])  # [in / 8, rows, 8]
    integers = packed.transpose(0, 1).flatten(1)[:, :columns]
    # A zero point of 0 is stored as 15: less one, in four bits.
    zero = (zero.flatten(1).t()[: end - begin] + stored.zero_offset) & 15
    return UnpackedInt4(integers, scale, zero)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [a, b] to uint8 [a, b, 8], the lowest four bits first."""
    halves = packed.contiguous().view(-1).view(torch.uint8).view(*packed.shape, 4)
    return torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2)


def _in_awq_order(nibbles: torch.Tensor) -> torch.Tensor:
    """Return the eight elements of each of AWQ's int32 in their logical order."""
    order = [awq.NIBBLES.index(i) for i in range(8)]
    return nibbles[..., order]
