"""The arena: one piece of memory that all tapes share for what they compute on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.graphs.places import Place, items_in, map_items
from ostinato.graphs.recorder import Call

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


@dataclass(frozen=True)
class Layout:
    """Where each storage lies: number -> offset in bytes. `size` is the bytes of all."""

    offsets: dict[int, int]
    size: int


def plan_layout(calls: Sequence[Call], sizes: Mapping[int, int], results: Sequence[Place]) -> Layout:
    """Offsets for the storages that the calls name (`sizes`: number -> bytes), so that no two that live at once
    overlap.

    A storage lives from the first call that names it to the last; those of `results` to the end. First fit in the
    order of the calls.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, call in enumerate([*calls, None]):
        named = items_in((call.args, call.kwargs, call.writes) if call else tuple(results), Place)
        for storage in {place.storage: None for place in named}:
            first.setdefault(storage, number)
            last[storage] = number
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for storage, number in first.items():
        begins.setdefault(number, []).append(storage)
        ends.setdefault(last[storage], []).append(storage)
    free = _FreeList()
    offsets: dict[int, int] = {}
    for number in range(len(calls) + 1):
        for storage in begins.get(number, ()):
            offsets[storage] = free.take(_aligned(sizes[storage]))
        for storage in ends.get(number, ()):
            free.give(offsets[storage], _aligned(sizes[storage]))
    return Layout(offsets, free.size)


class Arena:
    """Memory for tapes of which one runs at a time. When it grows, tapes must be bound to it again."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(0, dtype=torch.uint8, device=device)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.numel()

    def reserve(self, size: int) -> bool:
        """Makes room for `size` bytes -> whether it had to grow, and so lies elsewhere now."""
        if size <= self.size:
            return False
        self.memory = torch.zeros(size, dtype=torch.uint8, device=self.memory.device)
        return True

    def poison(self) -> None:
        """NaN everywhere, whatever the dtype, and -1 in integers: what reads before it writes shows it."""
        self.memory.fill_(0xFF)


def bind(value: Any, layout: Layout, memory: torch.Tensor) -> Any:
    """`value` with every Place in it as a tensor in `memory`."""
    return map_items(value, Place, lambda place: place.of(memory, layout.offsets[place.storage]))


def _aligned(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


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
