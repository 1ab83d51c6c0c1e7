"""A launch of a Triton kernel, as data: the plan shows it, the kernel's wrapper starts it, and a check compiles it.

An operation's row (`ops/facts.py`) names a function of this folder: plain sizes and the GPU's compute capability (80,
89, 90, 100, 120) -> its launches, in the order in which a call starts them. Nothing is tuned while the engine runs:
kernels that write states in place cannot be tried twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_WARPS = 16


@dataclass(frozen=True)
class Launch:
    """One kernel with all that is decided before its arguments are known.

    Dtypes and strides are not in it: the compiler takes them from the tensors of a call.
    """

    kernel: str
    """The name of a function in `ops/triton/NAME.py` of the operation."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    """Block sizes and other constants of compilation, by the names of the kernel's `tl.constexpr` parameters. What
    follows from a call's flags or tensors (whether there is a bias) the wrapper adds."""

    num_warps: int = 4
    num_stages: int = 1

    registers: int | None = None
    """Of a thread, at the most. None leaves it to the assembler, which spills one or two where another block fits on a
    multiprocessor then."""

    def __post_init__(self) -> None:
        assert self.num_warps in (1, 2, 4, 8, MAX_WARPS), "a block has a power of two warps"


def power_of_two(size: int, least: int = 1, most: int | None = None) -> int:
    """The smallest power of two that is at least `size` and `least`, but no larger than `most`, a power of two."""
    block = 1 << max(size - 1, 0).bit_length()
    block = max(block, least)
    return block if most is None else min(block, most)


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)
