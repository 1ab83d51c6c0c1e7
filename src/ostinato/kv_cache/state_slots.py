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

    def can_allocate(self, request_cache: RequestCache) -> bool:
        """Return whether a request without slots can have all that it needs."""
        return self.slots_per_request <= self._slots.num_available + self._can_reuse_checkpoint(request_cache)

    def attach(self, request_cache: RequestCache, checkpoint: Checkpoint) -> None:
        """Add a reference to the checkpoint of a hit, which the request's first step reads.

        A packed one is unpacked by `allocate_missing`: until then the request reads a negative slot.
        """
        request_cache.read_slot = checkpoint.slot
        if checkpoint.slot < 0:
            self._store.retain_packed(-checkpoint.slot)
        else:
            self._slots.retain((request_cache.read_slot,))

    def allocate_missing(self, request_cache: RequestCache, spare_slots: int = 0, is_own: bool = False) -> None:
        """Allocate the slots that are missing, as far as there are any. See `allocate`.

        `is_own`: the checkpoint that is read, if it is one, is of the request's last step, and not one that it hit.
        """
        missing = self.slots_per_request - len(request_cache.write_slots)
        available = self._slots.num_available
        is_packed = request_cache.read_slot < 0
        checkpoint = None if is_packed else self._store.index.checkpoint_of(request_cache.read_slot)
        # A pinned checkpoint is not given up for spare slots, nor another one to keep this one.
        is_pinned = checkpoint is not None and checkpoint.entry.pin is not None
        is_short = missing > available if is_pinned else missing + spare_slots > self._store.num_unpinned_slots
        if is_short and checkpoint is not None and self._can_reuse_checkpoint(request_cache):
            self._store.evict_checkpoint(checkpoint)
            self._store.counters.checkpoints_not_taken += is_own
            request_cache.write_slots += (request_cache.read_slot,)
            missing -= 1
        request_cache.write_slots += tuple(self._store.allocate_slots(min(missing, available)))
        if is_packed:
            # From now on the request reads its own slot, in place, and the checkpoint stays packed.
            self._store.unpack(-request_cache.read_slot, request_cache.write_slots[0])
            request_cache.read_slot = request_cache.write_slots[0]

    def allocate(self, request_cache: RequestCache, spare_slots: int = 0) -> bool:
        """Allocate the slots that the request's next step writes to; return False if it has none at all.

        Between steps it may lack some that became checkpoints. Without a slot, its batch row waits a step; with fewer
        than `slots_per_request`, it has room for fewer drafts.

        If allocating one would leave fewer than `spare_slots` available, the request takes over the checkpoint that it
        reads, in place, unless another request reads it too; the checkpoint leaves the index.
        """
        if len(request_cache.write_slots) < self.slots_per_request:
            self.allocate_missing(request_cache, spare_slots, is_own=True)
        return bool(request_cache.write_slots) or self.slots_per_request == 0

    def reserve(self, request_cache: RequestCache, positions: Iterable[int], spare_slots: int = 0) -> None:
        """Allocate slots for checkpoints that the next step writes out within its tokens, as far as available."""
        reserved = []
        for position in positions:
            if self._store.num_unpinned_slots <= spare_slots:
                self._store.counters.checkpoints_not_taken += 1
                continue
            reserved.append((position, self._store.allocate_slots(1)[0]))
        request_cache.reserved_checkpoints = tuple(reserved)

    def next_step_slots(self, request_cache: RequestCache, keeps: bool, spare_slots: int = 0) -> tuple[int, int]:
        """Return the slots that the step after the one in flight reads and writes.

        It begins where that one ends, before it is known whether that one succeeds.

        State is written in place, but not over one that may become a checkpoint when the step in flight is over
        (`keeps`: it ends at a block's end, and the request keeps checkpoints): that one is read and left to the index,
        and another slot is written. If that would leave fewer than `spare_slots` available, this checkpoint is not
        taken.
        """
        if not request_cache.write_slots:
            return 0, 0
        slot = request_cache.write_slots[0]
        if keeps:
            if self._store.num_unpinned_slots > spare_slots:
                request_cache.next_slots = tuple(self._store.allocate_slots(1))
                return slot, request_cache.next_slots[0]
            request_cache.next_step_overwrites = True
            self._store.counters.checkpoints_not_taken += 1
        return slot, slot

    def use_next_slots(self, request_cache: RequestCache) -> None:
        """Note that the step in flight is over and committed: the one after it is in flight now."""
        if request_cache.next_slots:
            # The state just written is read once more, as a checkpoint or not.
            request_cache.write_slots, request_cache.next_slots = request_cache.next_slots, ()
        request_cache.next_step_overwrites = False

    def accept_state(self, request_cache: RequestCache, num_accepted: int = 0) -> None:
        """Read the state behind the accepted drafts from now on, after a step of the request succeeded.

        Write slot i has the state behind i drafts. The request no longer reads its old slot.
        """
        if not request_cache.write_slots:
            return
        if request_cache.read_slot and request_cache.read_slot not in request_cache.write_slots:
            self._slots.release((request_cache.read_slot,))
        request_cache.read_slot = request_cache.write_slots[num_accepted]

    def free(self, request_cache: RequestCache) -> None:
        """Release all slots of a request."""
        if request_cache.read_slot < 0:
            self._store.packed.release((-request_cache.read_slot,))
            request_cache.read_slot = 0
        self._slots.release(referenced_slots(request_cache))

    def _can_reuse_checkpoint(self, request_cache: RequestCache) -> bool:
        """Return whether the request reads a checkpoint that no other request reads."""
        slot = request_cache.read_slot
        if slot < 0:
            return False
        return self._store.index.checkpoint_of(slot) is not None and self._slots.references(slot) == 1


def referenced_slots(request_cache: RequestCache) -> tuple[int, ...]:
    """Return the slots on which the request holds a reference."""
    read_slot, write_slots = request_cache.read_slot, request_cache.write_slots
    read = () if read_slot in write_slots or read_slot == 0 else (read_slot,)
    reserved = (slot for _, slot in request_cache.reserved_checkpoints)
    return (*write_slots, *read, *request_cache.next_slots, *reserved)
