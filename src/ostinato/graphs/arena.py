"""The arena: one piece of memory that all graphs share for what they compute on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ostinato.graphs.recorder import Call

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


@dataclass(frozen=True)
class Layout:
    """Where each storage lies: data pointer when it was recorded -> offset in bytes. `size` is the bytes of all."""

    offsets: dict[int, int]
    size: int


def plan_layout(calls: Sequence[Call], produced: dict[int, int], results: Sequence[torch.Tensor]) -> Layout:
    """Offsets for the storages in `produced` (pointer -> bytes), so that no two that live at once overlap.

    A storage lives from the first call that names it to the last; those of `results` to the end. First fit in the
    order of the calls.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for number, call in enumerate(calls):
        for tensor in tensors_of(call):
            pointer = tensor.untyped_storage().data_ptr()
            if pointer in produced:
                first.setdefault(pointer, number)
                last[pointer] = number
    for tensor in results:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in produced:
            first.setdefault(pointer, len(calls))
            last[pointer] = len(calls)
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for pointer, number in first.items():
        begins.setdefault(number, []).append(pointer)
        ends.setdefault(last[pointer], []).append(pointer)
    free = _FreeList()
    offsets: dict[int, int] = {}
    for number in range(len(calls) + 1):
        for pointer in begins.get(number, ()):
            offsets[pointer] = free.take(_aligned(produced[pointer]))
        for pointer in ends.get(number, ()):
            free.give(offsets[pointer], _aligned(produced[pointer]))
    return Layout(offsets, free.size)


class Arena:
    """Memory for graphs of which one runs at a time. It grows for a graph that needs more than those before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[torch.Tensor] = []

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.numel() for piece in self._pieces)

    def bind(self, calls: Sequence[Call], layout: Layout) -> list[Call]:
        """The calls with every tensor that the step computed moved into the arena."""
        piece = next((piece for piece in self._pieces if piece.numel() >= layout.size), None)
        if piece is None:
            piece = torch.zeros(max(layout.size, 1), dtype=torch.uint8, device=self._device)
            self._pieces.append(piece)
        return [
            replace(
                call,
                args=_map(call.args, layout, piece),
                kwargs=_map(call.kwargs, layout, piece),
                writes=_map(call.writes, layout, piece),
            )
            for call in calls
        ]

    def bind_tensor(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """One tensor, as `bind` placed it."""
        piece = next(piece for piece in self._pieces if piece.numel() >= layout.size)
        moved: torch.Tensor = _map(tensor, layout, piece)
        return moved


def tensors_of(call: Call) -> list[torch.Tensor]:
    """All tensors that a call names."""
    found: list[torch.Tensor] = []
    _collect((call.args, tuple(call.kwargs.values()), call.writes), found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)


def _map(value: Any, layout: Layout, piece: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        offset = layout.offsets.get(value.untyped_storage().data_ptr())
        if offset is None:
            return value
        elements = offset // value.element_size() + value.storage_offset()
        moved = torch.empty(0, dtype=value.dtype, device=value.device)
        return moved.set_(piece.untyped_storage(), elements, value.shape, value.stride())
    if isinstance(value, dict):
        return {name: _map(item, layout, piece) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, layout, piece) for item in value)
    return value


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
