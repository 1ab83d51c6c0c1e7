"""The blocks and slots of one request, and the usage of the cache by all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.cache.index import Checkpoint, Entry


@dataclass(slots=True)
class Holding:
    """The memory of one request.

    Entry i of `block_table` is for positions `i * block_size` to `(i + 1) * block_size - 1`; it has blocks for
    `capacity` tokens. The first `num_indexed` of them are in the index, the last one as `tip`, and may be other
    requests' too: they are only read.
    """

    block_table: tuple[int, ...] = ()
    capacity: int = 0
    pane_table: tuple[int, ...] = ()
    """Window blocks, indexed as `block_table`; 0 for those already freed, which precede `first_pane`."""
    first_pane: int = 0
    num_promised: int = 0
    """Blocks of tokens for which window blocks were promised to it."""
    slots: tuple[int, ...] = ()
    """Slots that only this request holds and its steps write to: `slots_per_request` of them when a batch row is made.
    """
    read_slot: int = 0
    """The slot that the next step reads its state from: one of `slots`, or a checkpoint, or 0 for the zero state."""
    reserved: tuple[tuple[int, int], ...] = ()
    """(position, slot): checkpoints that the step in flight writes out within its tokens."""
    ahead: tuple[int, ...] = ()
    """The slot that the next step writes to, if it differs from the slot of the step in flight."""
    is_overwritten: bool = False
    """True if the next step overwrites the in-flight step's final state."""
    tip: Entry | None = None
    num_indexed: int = 0
    trailing: Checkpoint | None = None
    """The checkpoint at the last block boundary that decoding passed."""
    superseded: tuple[Checkpoint, ...] = ()
    """Checkpoints before `trailing`, while the output may still turn out to end before it."""

    def entries(self) -> Iterator[Entry]:
        """Yield its indexed blocks, the last one first."""
        entry = self.tip
        while entry is not None:
            yield entry
            entry = entry.parent

    def references(self) -> tuple[int, ...]:
        """Return the slots on which the request holds a reference."""
        read = () if self.read_slot in self.slots or self.read_slot == 0 else (self.read_slot,)
        return (*self.slots, *read, *self.ahead, *(slot for _, slot in self.reserved))


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks, slots and window blocks held by requests, held by the index alone, and in all, without the null ones."""

    blocks_used: int
    blocks_cached: int
    blocks_total: int
    slots_used: int
    slots_cached: int
    slots_total: int
    panes_used: int = 0
    panes_cached: int = 0
    panes_total: int = 0
