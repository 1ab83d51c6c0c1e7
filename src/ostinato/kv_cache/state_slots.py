"""The slots that requests keep their state in: which one a step reads, and which ones it writes to.

Normally a request reads its state from the slot that it writes. If a checkpoint is taken, the slot just written stays
with the index, is read once more, and the next step writes to a fresh one. So no checkpoint is ever copied, and none is
ever written.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.kv_cache.prefix_index import Checkpoint
from ostinato.kv_cache.request_cache import RequestCache
from ostinato.kv_cache.store import CacheStore


class StateSlots:
    """Slots of running requests, `slots_per_request` for each; 0 for a model without state."""

    def __init__(self, store: CacheStore, per_request: int) -> None:
        self._store, self._slots = store, store.slots
        self.slots_per_request = per_request

    def can_allocate(self, holding: RequestCache) -> bool:
        """Return whether a request without slots can have all that it needs."""
        return self.slots_per_request <= self._slots.num_available + self._can_reuse_checkpoint(holding)

    def attach(self, holding: RequestCache, checkpoint: Checkpoint) -> None:
        """Add a reference to the checkpoint of a hit, which the request's first step reads."""
        holding.read_slot = checkpoint.slot
        self._slots.retain((holding.read_slot,))

    def allocate_missing(self, holding: RequestCache, spare_slots: int = 0, is_own: bool = False) -> None:
        """Allocate the slots that are missing, as far as there are any. See `allocate`.

        `is_own`: the checkpoint that is read, if it is one, is of the request's last step, and not one that it hit.
        """
        missing = self.slots_per_request - len(holding.write_slots)
        available = self._slots.num_available
        if missing + spare_slots > available and self._can_reuse_checkpoint(holding):
            checkpoint = self._store.index.checkpoint_of(holding.read_slot)
            assert checkpoint is not None, "what is taken over is a checkpoint"
            self._store.evict_checkpoint(checkpoint)
            self._store.counters.checkpoints_not_taken += is_own
            holding.write_slots += (holding.read_slot,)
            missing -= 1
        holding.write_slots += tuple(self._store.allocate_slots(min(missing, available)))

    def allocate(self, holding: RequestCache, spare_slots: int = 0) -> bool:
        """Allocate the slots that the request's next step writes to; return False if it has none at all.

        Between steps it may lack some that became checkpoints. Without a slot, its batch row waits a step; with fewer
        than `slots_per_request`, it has room for fewer drafts.

        If allocating one would leave fewer than `spare_slots` available, the request takes over the checkpoint that it
        reads, in place, unless another request reads it too; the checkpoint leaves the index.
        """
        if len(holding.write_slots) < self.slots_per_request:
            self.allocate_missing(holding, spare_slots, is_own=True)
        return bool(holding.write_slots) or self.slots_per_request == 0

    def reserve(self, holding: RequestCache, positions: Iterable[int], spare_slots: int = 0) -> None:
        """Allocate slots for checkpoints that the next step writes out within its tokens, as far as available."""
        reserved = []
        for position in positions:
            if self._slots.num_available <= spare_slots:
                self._store.counters.checkpoints_not_taken += 1
                continue
            reserved.append((position, self._store.allocate_slots(1)[0]))
        holding.reserved_checkpoints = tuple(reserved)

    def next_step_slots(self, holding: RequestCache, keeps: bool, spare_slots: int = 0) -> tuple[int, int]:
        """Return the slots that the step after the one in flight reads and writes.

        It begins where that one ends, before it is known whether that one succeeds.

        State is written in place, but not over one that may become a checkpoint when the step in flight is over
        (`keeps`: it ends at a block's end, and the request keeps checkpoints): that one is read and left to the index,
        and another slot is written. If that would leave fewer than `spare_slots` available, this checkpoint is not
        taken.
        """
        if not holding.write_slots:
            return 0, 0
        slot = holding.write_slots[0]
        if keeps:
            if self._slots.num_available > spare_slots:
                holding.next_slots = tuple(self._store.allocate_slots(1))
                return slot, holding.next_slots[0]
            holding.next_step_overwrites = True
            self._store.counters.checkpoints_not_taken += 1
        return slot, slot

    def use_next_slots(self, holding: RequestCache) -> None:
        """Note that the step in flight is over and committed: the one after it is in flight now."""
        if holding.next_slots:
            # The state just written is read once more, as a checkpoint or not.
            holding.write_slots, holding.next_slots = holding.next_slots, ()
        holding.next_step_overwrites = False

    def accept_state(self, holding: RequestCache, anchor: int = 0) -> None:
        """Read the state from write slot `anchor` from now on, after a step of the request succeeded.

        The request no longer reads its old slot.
        """
        if not holding.write_slots:
            return
        if holding.read_slot and holding.read_slot not in holding.write_slots:
            self._slots.release((holding.read_slot,))
        holding.read_slot = holding.write_slots[anchor]

    def _can_reuse_checkpoint(self, holding: RequestCache) -> bool:
        """Return whether the request reads a checkpoint that no other request reads."""
        slot = holding.read_slot
        return self._store.index.checkpoint_of(slot) is not None and self._slots.references(slot) == 1
