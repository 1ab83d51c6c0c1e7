"""The memory of blocks, panes and slots as bytes, and what was carried in it from one engine to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CacheMemory(Protocol):
    """The memory of blocks, panes and slots, whose ids the pools hand out.

    What is read is a copy, which goes to `into` where that is given, as many bytes as there are. Of a block or a pane,
    it is all of it, or its first `num_tokens` tokens with zeros behind them.
    """

    block_bytes: int
    pane_bytes: int
    slot_bytes: int

    def read_block(self, block: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview: ...
    def write_block(self, block: int, contents: memoryview) -> None: ...
    def read_pane(self, pane: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview: ...
    def write_pane(self, pane: int, contents: memoryview) -> None: ...
    def read_slot(self, slot: int, into: memoryview | None = None) -> memoryview: ...
    def write_slot(self, slot: int, contents: memoryview) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What another engine has computed of a request: the first `num_tokens` of its tokens."""

    num_tokens: int
    blocks: tuple[memoryview, ...]
    """Of those tokens, in their order; none in a model without attention, or with windows in all layers."""
    panes: tuple[memoryview, ...]
    """Of the last of those tokens, from `PaneRules.first` on; none in a model without windows."""
    state: memoryview | None
    """After the last of them; None in a model without state layers."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, (*self.blocks, *self.panes))) + (0 if self.state is None else len(self.state))
