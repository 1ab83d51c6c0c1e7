"""Quantised weights of checkpoints as numbers: float8, and 4-bit ones of compressed-tensors, GPTQ and AWQ.

A 4-bit weight is scale * (integer - zero point), with one scale and zero point for a group of elements of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ostinato.errors import ModelError
from ostinato.formats.quantization_config import AWQ_NIBBLES
from ostinato.ops.arrays import converted
from ostinato.plan.quantization import StoredWeights


def expanded(stored: StoredWeights, weight: np.ndarray, scale: np.ndarray, begin: int, columns: int) -> np.ndarray:
    """Return rows of a float8 matrix times their scales, as float32 [rows, columns].

    `weight` [rows, columns] begins at row `begin` of the matrix. `scale` is of the whole matrix: one number, one for
    each row, or one for each block.
    """
    return converted(weight, "float32") * scales(stored, scale, begin, begin + len(weight), columns, 1)


def scales(stored: StoredWeights, scale: np.ndarray, begin: int, end: int, columns: int, elements: int) -> np.ndarray:
    """Return the scales of the rows `begin` to `end` of a matrix, float32 [rows, columns / elements].

    Each `elements` of a row with `columns` elements share a scale.
    """
    scale, shape = scale.astype(np.float32), (end - begin, columns // elements)
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(1, 1), shape)
    if stored.block is None or stored.block == (0, 0):
        return np.broadcast_to(scale.reshape(-1, 1)[begin:end], shape)
    high, wide = stored.block
    return scale[(np.arange(begin, end) // high)[:, None], np.arange(shape[1]) * elements // wide]


Parts = Mapping[str, np.ndarray]
"""Tensors that hold one weight, by the format's names for them."""

MIDDLE = 8
"""Zero point of symmetric weights."""
ROW_MULTIPLE = 8
"""Number of rows whose zero points are in one int32, so that rows are unpacked in multiples of it."""


@dataclass(frozen=True)
class UnpackedInt4:
    """Some rows of a matrix, unpacked."""

    integers: np.ndarray
    """Stored integers, uint8 [rows, in], 0 to 15."""
    scale: np.ndarray
    """Scales, float32 [rows, groups]."""
    zero: np.ndarray
    """Zero points, uint8 [rows, groups], 0 to 15."""

    def dequantized(self, group_size: int | None, group_of: np.ndarray | None = None) -> np.ndarray:
        """Return the weights, [rows, in] float32.

        `group_of` int64 [in] is the group of each element, if the elements of a group are not neighbours.
        """
        columns = self.integers.shape[1]
        if group_of is None:
            size = columns if group_size is None else group_size
            scale, zero = (each.repeat(size, axis=1)[:, :columns] for each in (self.scale, self.zero))
        else:
            scale, zero = self.scale[:, group_of], self.zero[:, group_of]
        # The difference of two small integers is exact, so only the product is rounded.
        return scale * (self.integers.view(np.int8) - zero.view(np.int8))


def unpack(stored: StoredWeights, parts: Parts, begin: int, end: int, columns: int) -> UnpackedInt4:
    """Unpack the rows `begin`, a multiple of `ROW_MULTIPLE`, to `end` of a weight with `columns` elements per row."""
    unpacker = _compressed_tensors if stored.method == "compressed-tensors" else _columns_first
    return unpacker(stored, parts, begin, end, columns)


def group_index(stored: StoredWeights, parts: Parts, name: str, columns: int) -> np.ndarray | None:
    """Return the group of each element of a row, int64 [columns]; None if the elements of a group are neighbours.

    Raises ModelError if a checkpoint has an order that its config does not mention, or groups without scales.
    """
    index = parts.get("g_idx", parts.get("weight_g_idx"))
    if index is None or stored.group_size is None:
        return None
    groups = -(-columns // stored.group_size)
    index = index.astype(np.int64)
    if np.array_equal(index, np.arange(columns) // stored.group_size) or (index == -1).all():
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
    scale = parts["weight_scale"][begin:end].astype(np.float32)
    if stored.has_zeros:
        packed = parts["weight_zero_point"][begin // ROW_MULTIPLE : -(-end // ROW_MULTIPLE)]
        zero = _flat(_nibbles(packed.T)).T[: end - begin]
    else:
        zero = np.full(scale.shape, MIDDLE, np.uint8)
    integers = _flat(_nibbles(parts["weight_packed"][begin:end]))[:, :columns]
    return UnpackedInt4(integers, scale, zero)


def _columns_first(stored: StoredWeights, parts: Parts, begin: int, end: int, columns: int) -> UnpackedInt4:
    """Unpack GPTQ's or AWQ's tensors, which have inputs for rows and outputs for columns."""
    some = slice(begin // ROW_MULTIPLE, -(-end // ROW_MULTIPLE))
    scale = np.ascontiguousarray(parts["scales"][:, begin:end].T, np.float32)
    zero = _nibbles(parts["qzeros"][:, some])
    if stored.method == "awq":
        packed = _in_awq_order(_nibbles(parts["qweight"][:, some]))
        integers = np.ascontiguousarray(_flat(packed).T[: end - begin])
        return UnpackedInt4(integers, scale, _flat(_in_awq_order(zero)).T[: end - begin])
    packed = _nibbles(parts["qweight"][:, begin:end])  # [in / 8, rows, 8]
    integers = _flat(packed.swapaxes(0, 1))[:, :columns]
    # A zero point of 0 is stored as 15: less one, in four bits.
    zero = (_flat(zero).T[: end - begin] + np.uint8(stored.zero_offset)) & 15
    return UnpackedInt4(integers, scale, zero)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack int32 [a, b] to uint8 [a, b, 8], the lowest four bits first."""
    halves = np.ascontiguousarray(packed).view(np.uint8).reshape(*packed.shape, 4)
    return np.stack((halves & 15, halves >> 4), axis=-1).reshape(*packed.shape, 8)


def _flat(values: np.ndarray) -> np.ndarray:
    """Return [a, b, c] as [a, b * c]."""
    rows, groups, size = values.shape
    return values.reshape(rows, groups * size)


def _in_awq_order(nibbles: np.ndarray) -> np.ndarray:
    """Return the eight elements of each of AWQ's int32 in their logical order."""
    order = [AWQ_NIBBLES.index(i) for i in range(8)]
    return nibbles[..., order]
