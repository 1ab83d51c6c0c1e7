"""Slots as packed checkpoints: 8 bits for each element of a state that the kernels rounded for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ostinato.ops.sizes import DTYPE_BYTES, INT8_STATE_BLOCK, MAX_INT8

SCALE_BYTES = DTYPE_BYTES["float32"]


class StatePart(NamedTuple):
    """One array of a state, in all slots."""

    slots: np.ndarray
    """Float32 [slots, elements] if it is packed, else bytes [slots, bytes]."""
    row_size: int
    """Size of the state's last dimension if it is packed, else 0."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a packed checkpoint's part."""
        elements = int(self.slots.shape[1])
        if not self.row_size:
            return elements
        return elements + elements // self.row_size * num_blocks(self.row_size) * SCALE_BYTES


class PackedRows:
    """Slots on a CPU, whose states are at a block boundary (`MemoryRows`). Packing loses nothing then.

    A packed array has float32 scales [rows, blocks], followed by int8 integers [rows, size]: rows are those of the
    state's last dimension, and a block has up to `INT8_STATE_BLOCK` neighbours in one.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self._parts = parts
        self.sizes = [part.num_bytes for part in parts]

    def read(self, index: int, into: np.ndarray) -> None:
        for part, packed in self._pieces(into):
            if part.row_size:
                pack(part.slots[index].reshape(-1, part.row_size), packed)
            else:
                packed[:] = part.slots[index]

    def write(self, index: int, contents: memoryview) -> None:
        for part, packed in self._pieces(np.frombuffer(contents, np.uint8)):
            if part.row_size:
                unpack(packed, part.slots[index].reshape(-1, part.row_size))
            else:
                part.slots[index] = packed

    def _pieces(self, contents: np.ndarray) -> Iterator[tuple[StatePart, np.ndarray]]:
        start = 0
        for part, size in zip(self._parts, self.sizes, strict=True):
            yield part, contents[start : start + size]
            start += size


def num_blocks(row_size: int) -> int:
    """Return the blocks, and scales, of a row."""
    return -(-row_size // INT8_STATE_BLOCK)


def pack(state: np.ndarray, packed: np.ndarray) -> None:
    """Write `state` [rows, size] float32 to the bytes `packed`.

    Its values are what `packed_values` of `ops/reference/stochastic_rounding.py` returns: integers times a scale, which
    is exactly the largest of them divided by `MAX_INT8`.
    """
    scales, integers = _scales_and_integers(packed, state.shape)
    for number, block in enumerate(_blocks(state)):
        scale = np.abs(block).max(axis=1) / np.float32(MAX_INT8)
        scales[:, number] = scale
        scale[scale == 0] = 1.0
        # A block with NaN is NaN throughout, as its scale says.
        with np.errstate(invalid="ignore"):
            integers[:, number * INT8_STATE_BLOCK : (number + 1) * INT8_STATE_BLOCK] = block / scale[:, None]


def unpack(packed: np.ndarray, state: np.ndarray) -> None:
    """Write the packed state to `state` [rows, size] float32."""
    scales, integers = _scales_and_integers(packed, state.shape)
    for number, block in enumerate(_blocks(state)):
        whole = integers[:, number * INT8_STATE_BLOCK : (number + 1) * INT8_STATE_BLOCK]
        np.multiply(whole, scales[:, number, None], out=block)


def _blocks(state: np.ndarray) -> list[np.ndarray]:
    """Return views [rows, up to INT8_STATE_BLOCK] of the blocks of all rows."""
    return [state[:, start : start + INT8_STATE_BLOCK] for start in range(0, state.shape[1], INT8_STATE_BLOCK)]


def _scales_and_integers(packed: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the bytes `packed`: scales [rows, blocks] and integers [rows, size]."""
    rows, size = shape
    end = rows * num_blocks(size) * SCALE_BYTES
    return packed[:end].view(np.float32).reshape(rows, -1), packed[end:].view(np.int8).reshape(rows, size)
