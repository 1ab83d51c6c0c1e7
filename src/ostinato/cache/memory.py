"""The memory of blocks, window blocks and slots as bytes, and the KV snapshot that moves between engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CacheMemory(Protocol):
    """The memory of blocks, window blocks and slots, whose ids the pools allocate.

    Reading returns a copy, or fills `into`, as many bytes as there are. A block or window block is read whole, or its
    first `num_tokens` tokens with zeros behind them.
    """

    block_bytes: int
    window_block_bytes: int
    slot_bytes: int

    def read_block(self, block: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview: ...
    def write_block(self, block: int, contents: memoryview) -> None: ...
    def read_window_block(self, pane: int, num_tokens: int | None = None, into: memoryview | None = None) -> memoryview: ...
    def write_window_block(self, pane: int, contents: memoryview) -> None: ...
    def read_slot(self, slot: int, into: memoryview | None = None) -> memoryview: ...
    def write_slot(self, slot: int, contents: memoryview) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class KVSnapshot:
    """KV snapshot from another engine: the first `num_tokens` tokens of a request, computed."""

    num_tokens: int
    blocks: tuple[memoryview, ...]
    """Blocks of those tokens, in order; none in a model without attention, or with windows in all layers."""
    window_blocks: tuple[memoryview, ...]
    """Window blocks of the last of those tokens, from `SlidingWindowSpec.first_block` on; none in a model without windows."""
    state: memoryview | None
    """State after the last of them; None in a model without state layers."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, (*self.blocks, *self.window_blocks))) + (0 if self.state is None else len(self.state))
