"""The arena: one piece of memory that all tapes share for what they compute on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ostinato.graphs.places import Place, items_in, map_items
from ostinato.graphs.recorder import Call
from ostinato.plan.graphs.first_fit import ALIGNMENT, Layout, first_fit


def plan_layout(calls: Sequence[Call], sizes: Mapping[int, int], results: Sequence[Place], entries: int = 1) -> Layout:
    """Offsets for the storages that the calls name (`sizes`: number -> bytes), so that no two that live at once
    overlap. Each takes as many whole cache lines for every one of the step's `entries`, so that steps of any number of
    them are laid out alike, and the arena grows with the largest: the plan counts on it.

    A storage lives from the first call that names it to the last; those of `results` to the end. First fit in the
    order of the calls.
    """
    lives: dict[int, tuple[int, int]] = {}
    for number, call in enumerate([*calls, None]):
        named = items_in((call.args, call.kwargs, call.writes) if call else tuple(results), Place)
        for storage in {place.storage: None for place in named}:
            lives[storage] = (lives[storage][0] if storage in lives else number, number)
    return first_fit(sizes, lives, ALIGNMENT * entries)


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
