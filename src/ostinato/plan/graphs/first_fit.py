"""First fit: offsets of buffers in a shared piece of memory, each for its own lifetime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
