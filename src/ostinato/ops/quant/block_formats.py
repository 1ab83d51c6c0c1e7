"""Formats of weights in blocks: a number of elements of a row in a number of bytes. Imports no torch.

`dequantize.py` defines the values of a block. Formats with names in capitals are GGUF's (github.com/ggml-org/ggml); the
others are made by Ostinato, from 4-bit and float8 checkpoints or from any weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ostinato.errors import ModelError

Family = Literal["gguf", "mxfp4", "int4", "float8"]
"""Kind of a format: GGUF's (MXFP4 is by itself), or one of our own formats of 4-bit integers or of float8."""

Blocks = tuple[tuple[str, int], ...]
"""Formats of a matrix's consecutive rows: (name of a format, number of rows).

Rows of one matrix have different formats if several tensors of a file, with different formats, are one matrix here.
"""


@dataclass(frozen=True)
class BlockFormat:
    """Format whose rows are sequences of blocks of `elements` weights in `num_bytes` bytes each."""

    name: str
    elements: int
    num_bytes: int
    family: Family = "gguf"
    can_be_made: bool = False
    """True if weights can be quantised to it."""

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.num_bytes / self.elements

    def row_bytes(self, in_size: int) -> int:
        """Return the bytes of a row. ModelError if it is not whole blocks, as damaged metadata may say."""
        if in_size % self.elements:
            raise ModelError(f"rows of {in_size:,} weights cannot be blocks of {self.name}, which have {self.elements}")
        return in_size // self.elements * self.num_bytes


BLOCK_FORMATS = {
    each.name: each
    for each in (
        BlockFormat("Q4_0", 32, 18),
        BlockFormat("Q4_1", 32, 20),
        BlockFormat("Q5_0", 32, 22),
        BlockFormat("Q5_1", 32, 24),
        BlockFormat("Q8_0", 32, 34, can_be_made=True),
        BlockFormat("Q4_K", 256, 144),
        BlockFormat("Q5_K", 256, 176),
        BlockFormat("Q6_K", 256, 210),
        BlockFormat("IQ4_NL", 32, 18),
        BlockFormat("IQ4_XS", 256, 136),
        BlockFormat("MXFP4", 32, 17, "mxfp4"),
        BlockFormat("int4_g32", 32, 20, "int4", can_be_made=True),
        BlockFormat("int4_g64", 64, 36, "int4", can_be_made=True),
        BlockFormat("int4_g128", 128, 68, "int4", can_be_made=True),
        BlockFormat("fp8_g32", 32, 36, "float8", can_be_made=True),
        BlockFormat("fp8_g64", 64, 68, "float8", can_be_made=True),
        BlockFormat("fp8_g128", 128, 132, "float8", can_be_made=True),
    )
}
"""Block formats by name. If a format has no native kernel, the reference dequantizes it in every step."""


def formats_of(family: Family) -> tuple[str, ...]:
    """Return the names of a family's formats, those of the largest blocks first."""
    of_family = (each for each in BLOCK_FORMATS.values() if each.family == family)
    return tuple(each.name for each in sorted(of_family, key=lambda each: -each.elements))


def num_bytes(blocks: Blocks, in_size: int) -> int:
    """Return the bytes of all rows."""
    return sum(rows * BLOCK_FORMATS[name].row_bytes(in_size) for name, rows in blocks)


def merge_adjacent(blocks: Blocks) -> Blocks:
    """Return `blocks` with neighbours of one format merged."""
    found: list[tuple[str, int]] = []
    for name, rows in blocks:
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + rows)
        else:
            found.append((name, rows))
    return tuple(found)


def slice_rows(blocks: Blocks, begin: int, end: int) -> Blocks:
    """Return the formats of the rows `begin` to `end`."""
    found, first = [], 0
    for name, rows in blocks:
        inside = min(end, first + rows) - max(begin, first)
        if inside > 0:
            found.append((name, inside))
        first += rows
    return tuple(found)
