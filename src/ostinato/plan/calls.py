"""The calls of a forward pass as plain numbers: the size of each result, and so the arena that a tape of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ostinato.plan.graphs.first_fit import ALIGNMENT, pack_buffers

FIXED_BYTES = {"float32": 4, "int32": 4, "int64": 8}
"""Bytes of an element in the dtypes that do not follow the model's."""


@dataclass(frozen=True)
class TraceCall:
    """One call, as a recorder records it. Views are not calls.

    A kernel is one call, whichever implementation runs; its own scratch memory does not count. `elements` are those of
    its result, 0 where the result is an argument. `dtype` is the result's, with `model` for the model's own. `reads`
    are the numbers of the calls whose results it reads, besides weights, inputs and cache memory.
    """

    operation: str
    elements: int
    dtype: str
    reads: tuple[int, ...]
    part: str | None = None
    """Part of a layer that the call belongs to, which piecewise graphs may leave out: `attention`, `state` or `moe`."""
    part_number: int = 0
    cast_source_dtype: str | None = None
    """Dtype that the call only converts from. If both dtypes are the same, there is no call."""


@dataclass(frozen=True)
class CallTrace:
    """Calls of one pass over `entries` entries of its inputs, which are tokens or patches.

    For n times as many entries each result is n times as large.
    """

    calls: tuple[TraceCall, ...] = ()
    result: int = 0
    """Number of the call with the result of the whole pass, which stays alive until the next pass."""
    entries: int = 1

    @cached_property
    def _hash(self) -> int:
        return hash((self.calls, self.result, self.entries))

    def __hash__(self) -> int:
        return self._hash

    def arena_bytes(self, dtype_bytes: int, entries: int, leaves_out: frozenset[str] = frozenset()) -> int:
        """Return the bytes of the arena of a tape of these calls for `entries` entries.

        Parts that the tape `leaves_out` are one call each; their intermediate results are not in the arena.
        """
        return _arena_bytes(self, dtype_bytes, leaves_out) * entries // self.entries

    @property
    def widest_elements(self) -> int:
        """Largest number of elements, for one entry, of the results that are alive at once, whatever their dtypes."""
        steps = _steps(self, dict.fromkeys((*FIXED_BYTES, "model"), 1), frozenset())
        sizes, lives = _lives(steps, self.result)
        at_once = (
            sum(size for call, size in sizes.items() if lives[call][0] <= i <= lives[call][1])
            for i in range(len(steps))
        )
        return -(-max(at_once) // self.entries)


NO_CALLS = CallTrace()


@dataclass(frozen=True)
class _Step:
    """One call of a tape: `result` is the number of the call whose result it returns, `size` its bytes."""

    result: int
    size: int
    reads: frozenset[int]


@lru_cache(maxsize=256)
def _arena_bytes(calls: CallTrace, dtype_bytes: int, leaves_out: frozenset[str]) -> int:
    """Return the arena's bytes for `calls.entries` entries.

    A tape gives each result a multiple of `ALIGNMENT` bytes for every entry, so that the layout is the same for any
    number of entries.
    """
    steps = _steps(calls, FIXED_BYTES | {"model": dtype_bytes}, leaves_out)
    return pack_buffers(*_lives(steps, calls.result), ALIGNMENT * calls.entries).size


def _lives(steps: list[_Step], result: int) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Return each result's size, and the first and the last step that needs it; `result` is needed until the end."""
    sizes = {step.result: step.size for step in steps if step.size}
    lives: dict[int, tuple[int, int]] = {}
    for moment, step in enumerate(steps):
        for read in step.reads:
            lives[read] = (lives[read][0], moment)
        if step.size:
            lives[step.result] = (moment, moment)
    if result in lives:
        lives[result] = (lives[result][0], len(steps))
    return sizes, lives


def _steps(calls: CallTrace, widths: Mapping[str, int], leaves_out: frozenset[str]) -> list[_Step]:
    steps: list[_Step] = []
    lies_in: dict[int, int | None] = {}  # call -> the call whose result it returns, None if it returns none
    parts: dict[int, list[int]] = {}
    for number, call in enumerate(calls.calls):
        if call.part in leaves_out:
            parts.setdefault(call.part_number, []).append(number)
    for number, call in enumerate(calls.calls):
        if call.cast_source_dtype is not None and widths[call.cast_source_dtype] == widths[call.dtype]:
            lies_in[number] = lies_in[call.reads[0]] if call.reads else None
            continue
        members = parts[call.part_number] if call.part in leaves_out else [number]
        if number != members[-1]:
            lies_in[number] = None
            continue
        read = {lies_in[read] for member in members for read in calls.calls[member].reads if read not in members}
        lies_in[number] = number if call.elements else lies_in[call.reads[0]] if call.reads else None
        size = call.elements * widths[call.dtype]
        steps.append(_Step(number, size, frozenset(each for each in read if each is not None)))
    return steps
