"""Arena of a tape: a forward pass as plain numbers, and the memory that its results take.

The offset of each buffer in a shared piece of memory is found by first fit, for the buffer's own lifetime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ostinato.ops.sizes import DTYPE_BYTES

ALIGNMENT = 64
"""Alignment in bytes: a cache line, and the widest vector."""


@dataclass(frozen=True)
class Layout:
    """Layout of buffers: number -> offset in bytes. `size` is the bytes of all."""

    offsets: dict[int, int]
    size: int


def pack_buffers(sizes: Mapping[int, int], lives: Mapping[int, tuple[int, int]], alignment: int = ALIGNMENT) -> Layout:
    """Return offsets for the buffers of `lives`, so that no two that live at once overlap.

    `lives` maps a buffer's number to its first and its last moment, `sizes` to its bytes, which are rounded up to a
    multiple of `alignment`. The function goes through the moments in order. Buffers that begin in one moment are placed
    in the order of `lives`, each into the first gap that holds it.
    """
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for buffer, (first, last) in lives.items():
        begins.setdefault(first, []).append(buffer)
        ends.setdefault(last, []).append(buffer)
    free = _FreeList()
    offsets: dict[int, int] = {}
    for moment in sorted({*begins, *ends}):
        for buffer in begins.get(moment, ()):
            offsets[buffer] = free.take(_aligned(sizes[buffer], alignment))
        for buffer in ends.get(moment, ()):
            free.give(offsets[buffer], _aligned(sizes[buffer], alignment))
    return Layout(offsets, free.size)


def _aligned(size: int, alignment: int) -> int:
    return -(-max(size, 1) // alignment) * alignment


class _FreeList:
    """First fit over one range that grows at its end."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[tuple[int, int]] = []  # (offset, size), by offset, never adjacent

    def take(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        if self._holes and sum(self._holes[-1]) == self.size:
            offset, _ = self._holes.pop()
        else:
            offset = self.size
        self.size = offset + size
        return offset

    def give(self, offset: int, size: int) -> None:
        holes = sorted([*self._holes, (offset, size)])
        merged: list[tuple[int, int]] = []
        for begin, room in holes:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self._holes = merged


FIXED_BYTES = {dtype: DTYPE_BYTES[dtype] for dtype in ("float32", "int32", "int64")}
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


@dataclass(frozen=True)
class CallTrace:
    """Calls of one pass over `entries` entries (tokens or patches); each result is proportional to their number."""

    calls: tuple[TraceCall, ...] = ()
    result: int = 0
    """Number of the call with the result of the whole pass, which stays alive until the next pass."""
    entries: int = 1
    on_last_rank: CallTrace | None = None
    """Calls of the same pass on the last of several ranks, which reads no residual stream where the first adds it."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.calls, self.result, self.entries, self.on_last_rank))

    def __hash__(self) -> int:
        return self._hash

    def arena_bytes(self, dtype_bytes: int, entries: int, leaves_out: frozenset[str] = frozenset()) -> int:
        """Return the bytes of the arena of a tape of these calls for `entries` entries.

        They are those of the rank that takes most. Parts that the tape `leaves_out` are one call each; their
        intermediate results are not in the arena.
        """
        own = _arena_bytes(self, dtype_bytes, leaves_out) * entries // self.entries
        other = self.on_last_rank
        # Results that end earlier may be placed worse, so neither rank's arena bounds the other's.
        return own if other is None else max(own, other.arena_bytes(dtype_bytes, entries, leaves_out))

    @property
    def widest_elements(self) -> int:
        """Largest number of elements, for one entry, of the results that are alive at once, whatever their dtypes."""
        return -(-self._live_size(dict.fromkeys((*FIXED_BYTES, "model"), 1)) // self.entries)

    def live_bytes(self, dtype_bytes: int, entries: int) -> int:
        """Return the bytes of the results that are alive at once without an arena, for `entries` entries."""
        return self._live_size(FIXED_BYTES | {"model": dtype_bytes}) * entries // self.entries

    def _live_size(self, widths: Mapping[str, int]) -> int:
        steps = _steps(self, widths, frozenset())
        sizes, lives = _lives(steps, self.result)
        at_once = (
            sum(size for call, size in sizes.items() if lives[call][0] <= i <= lives[call][1])
            for i in range(len(steps))
        )
        return max(at_once, default=0)


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
        members = parts[call.part_number] if call.part in leaves_out else [number]
        if number != members[-1]:
            lies_in[number] = None
            continue
        read = {lies_in[read] for member in members for read in calls.calls[member].reads if read not in members}
        lies_in[number] = number if call.elements else lies_in[call.reads[0]] if call.reads else None
        size = call.elements * widths[call.dtype]
        steps.append(_Step(number, size, frozenset(tensor for tensor in read if tensor is not None)))
    return steps
