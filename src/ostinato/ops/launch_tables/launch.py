"""Launches of Triton kernels as data: the plan shows them, a kernel's wrapper starts them, and a check compiles them.

An operation's row (`ops/operations.py`) names a function of this folder: plain sizes and the GPU's compute capability
(80, 89, 90, 100, 120) -> its launches, in the order in which a call starts them. Nothing is tuned while the engine
runs: kernels that write states in place cannot be tried twice.

The tiles over ragged rows are counted here too (`ops/triton/common.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_WARPS = 16


@dataclass(frozen=True)
class Launch:
    """One kernel with all that is decided before its arguments are known.

    Dtypes and strides are not part of it: the compiler takes them from the tensors of a call.
    """

    kernel: str
    """Name of a function in `ops/triton/NAME.py` of the operation."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    """Block sizes and other constants of compilation, by the names of the kernel's `tl.constexpr` parameters.

    The wrapper adds constants that follow from a call's flags or tensors (for instance if there is a bias).
    """

    num_warps: int = 4
    num_stages: int = 1

    registers: int | None = None
    """Most registers of a thread.

    None leaves the number to the assembler, which spills one or two if then another block fits on a multiprocessor.
    """

    def __post_init__(self) -> None:
        assert self.num_warps in (1, 2, 4, 8, MAX_WARPS), "a block has a power of two warps"


def power_of_two(size: int, least: int = 1, most: int | None = None) -> int:
    """Return the smallest power of two that is at least `size` and `least`, but at most `most`, a power of two."""
    block = 1 << max(size - 1, 0).bit_length()
    block = max(block, least)
    return block if most is None else min(block, most)


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that cover `size`."""
    return -(-size // block)


SPAN = 128
"""Rows whose starts a program reads at a time to find its row."""


def num_tiles(tokens: int, rows: int, tile: int) -> int:
    """Return the number of tiles of `tile` tokens that cover `rows` rows and the tokens after them.

    `tokens` is the most that the rows have together.
    """
    return tokens // tile + rows + 1
