"""What one request holds of the cache, and what all of them use together."""

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
    """As `block_table`, for layers with a window; 0 where the pane was let go of, which is before `first_pane`."""
    first_pane: int = 0
    num_promised: int = 0
    """Blocks of tokens for which it was promised panes."""
    slots: tuple[int, ...] = ()
    """The request's own, which its steps write to: `slots_per_request` of them when a row is made."""
    read_slot: int = 0
    """Where the next step reads its state: one of `slots`, or a checkpoint, or 0 for the zero state."""
    reserved: tuple[tuple[int, int], ...] = ()
    """(position, slot): checkpoints that the step in flight writes out on its way."""
    ahead: tuple[int, ...] = ()
    """The slot that the step behind the one in flight writes to, if that is another one than of the one in flight."""
    is_overwritten: bool = False
    """Whether the step behind the one in flight writes over the state that that one leaves."""
    tip: Entry | None = None
    num_indexed: int = 0
    trailing: Checkpoint | None = None
    """The checkpoint at the last block boundary that decoding passed."""
    superseded: tuple[Checkpoint, ...] = ()
    """Those before it, while the output may still turn out to end before `trailing`."""

    def entries(self) -> Iterator[Entry]:
        """Its blocks that are indexed, the last one first."""
        entry = self.tip
        while entry is not None:
            yield entry
            entry = entry.parent

    def references(self) -> tuple[int, ...]:
        """The slots on which the request holds a reference."""
        read = () if self.read_slot in self.slots or self.read_slot == 0 else (self.read_slot,)
        return (*self.slots, *read, *self.ahead, *(slot for _, slot in self.reserved))


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks, slots and panes held by requests, those that only the index holds, and how many there are (the null ones
    do not count)."""

    blocks_used: int
    blocks_cached: int
    blocks_total: int
    slots_used: int
    slots_cached: int
    slots_total: int
    panes_used: int = 0
    panes_cached: int = 0
    panes_total: int = 0
