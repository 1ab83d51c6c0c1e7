"""Cache manager: block tables of the requests, and their positions in the prefix index.

Window blocks are in `sliding_window.py`, slots for states in `state_slots.py`. `check_integrity` tests the invariants
between two calls.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from ostinato.kv_cache.checkpoints import CheckpointPositions, index_blocks, index_blocks_and_states
from ostinato.kv_cache.eviction import EvictionCosts, EvictionPolicy
from ostinato.kv_cache.prefix_index import BlockHashes, IndexEntry
from ostinato.kv_cache.request_cache import CacheMemory, CacheUsage, KVSnapshot, RequestCache
from ostinato.kv_cache.sliding_window import SlidingWindowSpec, WindowBlocks
from ostinato.kv_cache.state_slots import StateSlots, referenced_slots
from ostinato.kv_cache.store import CacheStore, Match

log = logging.getLogger("ostinato.cache")


def check_cache_integrity(
    store: CacheStore,
    request_caches: Mapping[str, RequestCache],
    slots_per_request: int,
    window_blocks: WindowBlocks | None,
) -> None:
    """Raise AssertionError unless references are exact and shared memory cannot be written.

    `request_caches` has each request's blocks and slots by its id.
    """
    store.check_integrity()
    tables = Counter(id for request_cache in request_caches.values() for id in request_cache.block_table)
    slots = Counter(id for request_cache in request_caches.values() for id in referenced_slots(request_cache))
    window_tables = Counter(
        id
        for request_cache in request_caches.values()
        for id in request_cache.window_block_table[request_cache.first_window_block :]
    )
    for pool, holders in ((store.blocks, tables), (store.slots, slots), (store.window_blocks, window_tables)):
        assert holders[0] == 0, f"the null {pool.name} was handed out"
        for id in range(1, pool.count):
            assert holders[id] == pool.references(id), (
                f"{pool.name} {id} has {pool.references(id)} references and {holders[id]} holders"
            )
    stands = Counter(
        request_cache.last_entry for request_cache in request_caches.values() if request_cache.last_entry is not None
    )
    for entry in store.index:
        assert entry.num_holders == stands[entry], "an entry has another number of holders than requests stand there"
    if window_blocks is not None:
        window_blocks.check_integrity(tuple(request_caches.values()))
    for request_id, request_cache in request_caches.items():
        _check_request_cache(store, request_id, request_cache, slots_per_request)


def _check_request_cache(
    store: CacheStore, request_id: str, request_cache: RequestCache, slots_per_request: int
) -> None:
    path = list(request_cache.entries())
    assert len(path) == request_cache.num_indexed, f"request {request_id} stands elsewhere in the index"
    blocks = store.blocks
    if blocks.count > 0:
        shared = tuple(entry.block for entry in reversed(path))
        assert request_cache.block_table[: len(path)] == shared, f"request {request_id} has blocks beside the index"
        for block in request_cache.block_table[len(path) :]:
            assert not blocks.is_cached(block), f"request {request_id} may write to block {block} of the index"
            assert blocks.references(block) == 1, f"block {block} has two writers"
    assert not any(request_cache.window_block_table[: request_cache.first_window_block]), (
        f"request {request_id} has window blocks before its first"
    )
    for index, id in enumerate(
        request_cache.window_block_table[request_cache.first_window_block :], start=request_cache.first_window_block
    ):
        if index < len(path):
            window_block = path[-1 - index].window_block
            assert (0 if window_block is None else window_block.id) == id, (
                f"request {request_id} has window blocks beside the index"
            )
            continue
        assert not store.window_blocks.is_cached(id), (
            f"request {request_id} may write to window block {id} of the index"
        )
        assert store.window_blocks.references(id) == 1, f"window block {id} has two writers"
    for slot in (
        *request_cache.write_slots,
        *request_cache.next_slots,
        *(slot for _, slot in request_cache.reserved_checkpoints),
    ):
        assert not store.slots.is_cached(slot), f"request {request_id} may write to slot {slot} of the index"
        assert store.slots.references(slot) == 1, f"slot {slot} has two writers"
    assert len(set(request_cache.write_slots)) == len(request_cache.write_slots), (
        f"request {request_id} has a slot twice"
    )
    lacks = slots_per_request - len(request_cache.write_slots)
    assert lacks >= 0, f"request {request_id} has {-lacks} slots too many"
    assert request_cache.write_slots or not lacks or request_cache.read_slot, f"request {request_id} has lost its state"


_NO_COSTS = EvictionCosts()


class CacheManager:
    """Manager of the requests' blocks and slots: it allocates and frees them, and commits computed blocks to the index.

    `num_blocks` and `num_slots` are the planned counts and include the null block and the null slot; 0 blocks is a
    model without attention, 0 slots one without state layers, and then none are needed. With `num_window_blocks`, the
    null one among them, there are layers with windows, whose keys and values are in window blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        block_size: int,
        slots_per_request: int = 1,
        eviction: EvictionPolicy = "marconi",
        costs: EvictionCosts = _NO_COSTS,
        num_window_blocks: int = 0,
        window_block_rules: SlidingWindowSpec | None = None,
        max_pins: int = 0,
        max_pinned_blocks: int = 0,
        num_packed: int = 0,
    ) -> None:
        assert block_size > 0, f"a block cannot hold {block_size} tokens"
        assert slots_per_request > 0, f"a request cannot have {slots_per_request} slots"
        self.block_size = block_size
        blocks_per_window = 0 if window_block_rules is None else window_block_rules.blocks_per_window
        self.store = CacheStore(
            num_blocks,
            num_slots,
            eviction,
            costs,
            num_window_blocks,
            blocks_per_window,
            max_pins,
            max_pinned_blocks,
            num_packed,
        )
        self.blocks, self.slots = self.store.blocks, self.store.slots
        self.window_blocks = None if window_block_rules is None else WindowBlocks(window_block_rules, self.store)
        self.state_slots = StateSlots(self.store, slots_per_request if num_slots > 0 else 0)
        self._request_caches: dict[str, RequestCache] = {}

    @property
    def memory(self) -> CacheMemory | None:
        """The memory of the blocks, window blocks and slots, for KV that is exported, imported or packed; else None."""
        return self.store.memory

    @memory.setter
    def memory(self, memory: CacheMemory | None) -> None:
        self.store.memory = memory

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many blocks hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size) if self.blocks.count > 0 else 0

    def window_blocks_needed(self, num_tokens: int) -> int:
        """Return how many window blocks a request has if exactly its first `num_tokens` tokens are computed."""
        return (
            0
            if self.window_blocks is None
            else -(-num_tokens // self.block_size) - self.window_blocks.rules.first_block(num_tokens)
        )

    def max_request_tokens(self) -> int:
        """Return the most tokens that a request can have when alone; `sys.maxsize` if nothing limits it."""
        if self.state_slots.slots_per_request > self.slots.capacity:
            return 0
        max_blocks = [self.blocks.capacity] if self.blocks.count > 0 else []
        if self.window_blocks is not None and self.window_blocks.max_blocks is not None:
            max_blocks.append(self.window_blocks.max_blocks)
        return min(max_blocks) * self.block_size if max_blocks else sys.maxsize

    def admit(
        self,
        request_id: str,
        num_tokens: int,
        match: Match | None = None,
        spare_blocks: int = 0,
        spare_window_blocks: int = 0,
        *,
        uses_checkpoint: bool = True,
    ) -> bool:
        """Attach a new request to its hit, and allocate blocks for its first `num_tokens` tokens, and its slots.

        Returns False if that is not available: the request then holds nothing, and at most something idle was evicted
        for it. Beyond the blocks, `spare_blocks` must stay available, and beyond its window blocks
        `spare_window_blocks`. Without `uses_checkpoint`, state and window blocks are imported (`import_kv`), and it
        attaches blocks of the index alone.
        """
        match = match or Match()
        # The hit is referenced before anything is allocated, so that it is not evicted for that.
        request_cache = self._attach(match.path, uses_checkpoint)
        self._request_caches[request_id] = request_cache
        if not self.state_slots.can_allocate(request_cache) or not self.grow(
            request_id, num_tokens, spare_blocks, spare_window_blocks
        ):
            self._free(self._request_caches.pop(request_id))
            return False
        self.state_slots.allocate_missing(request_cache)
        self.store.touch(request_cache.last_entry)
        self.store.touch_window(request_cache.last_entry, is_hit=True)
        if request_cache.last_entry is not None:
            request_cache.last_entry.hits += 1
        checkpoint = None if request_cache.last_entry is None else request_cache.last_entry.checkpoint
        if checkpoint is not None and uses_checkpoint:
            checkpoint.hits += 1
            checkpoint.last_use = self.store.now
        if request_cache.last_entry is not None and request_cache.last_entry.pin is not None:
            self.store.pins.refresh(request_cache.last_entry)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %d of %d tokens are cached", request_id, match.hit, num_tokens)
        return True

    def import_kv(self, request_id: str, snapshot: KVSnapshot, block_hashes: BlockHashes | None) -> None:
        """Write imported KV into the memory of a request that was just admitted for it, after the blocks of its hit.

        No step may be in flight. With `block_hashes`, full blocks are indexed at once: they were computed in steps
        that succeeded, though not here.
        """
        request_cache, memory = self._request_caches[request_id], self.memory
        assert memory is not None, "importing KV needs writable cache memory"
        if self.window_blocks is not None:
            for index in self.window_blocks.allocate_imported(
                request_cache, list(request_cache.entries())[::-1], snapshot.num_tokens
            ):
                memory.write(
                    "window_block",
                    request_cache.window_block_table[index],
                    snapshot.window_blocks[index - request_cache.first_window_block],
                )
        for index in range(request_cache.num_indexed, len(snapshot.blocks)):
            memory.write("block", request_cache.block_table[index], snapshot.blocks[index])
        if snapshot.state is not None:
            request_cache.read_slot = request_cache.write_slots[0]
            memory.write("slot", request_cache.read_slot, snapshot.state)
        if block_hashes is not None:
            index_blocks(self.store, request_cache, block_hashes, snapshot.num_tokens)
            self.store.trim()

    def grow(self, request_id: str, num_tokens: int, spare_blocks: int = 0, spare_window_blocks: int = 0) -> bool:
        """Allocate blocks for the request's first `num_tokens` tokens, and reserve window blocks for them.

        Returns False, and changes nothing, if not enough are free or evictable. If blocks have to be allocated,
        `spare_blocks` must stay available beyond them, and if window blocks have to be reserved, `spare_window_blocks`.
        The block table is extended at its end, and a batch row made earlier keeps the one it has. A call that needs no
        new block costs one look-up.
        """
        request_cache = self._request_caches[request_id]
        if num_tokens <= request_cache.capacity:
            return True
        missing = self.blocks_needed(num_tokens) - len(request_cache.block_table)
        if missing > 0 and missing + spare_blocks > self.blocks.num_available:
            return False
        num_blocks = -(-num_tokens // self.block_size)
        if self.window_blocks is not None and not self.window_blocks.reserve(
            request_cache, num_blocks, spare_window_blocks
        ):
            return False
        if missing > 0:
            request_cache.block_table += tuple(self.store.allocate_blocks(missing))
        has_memory = self.blocks.count > 0 or self.window_blocks is not None
        request_cache.capacity = num_blocks * self.block_size if has_memory else sys.maxsize
        return True

    def max_growable_tokens(self, request_id: str) -> int:
        """Return the number of tokens up to which the request can `grow`."""
        request_cache = self._request_caches[request_id]
        max_blocks = [self.blocks.num_available] if self.blocks.count > 0 else []
        if self.window_blocks is not None and (more := self.window_blocks.max_growth(request_cache)) is not None:
            max_blocks.append(more)
        return request_cache.capacity + min(max_blocks) * self.block_size if max_blocks else sys.maxsize

    def allocate_window_blocks(self, request_id: str, end: int) -> None:
        """Allocate the window blocks that the request's next batch row writes to, whose tokens end before `end`."""
        assert self.window_blocks is not None, "a model without windows has no window blocks"
        self.window_blocks.allocate(self._request_caches[request_id], end)

    def shrink(self, request_id: str, num_tokens: int) -> bool:
        """Free the request's blocks beyond its first `num_tokens` known tokens. Return whether there were any."""
        request_cache = self._request_caches[request_id]
        needed = -(-num_tokens // self.block_size)
        if request_cache.capacity <= needed * self.block_size or request_cache.capacity == sys.maxsize:
            return False
        self.blocks.release(request_cache.block_table[needed:])
        request_cache.block_table = request_cache.block_table[:needed]
        request_cache.capacity = needed * self.block_size
        if self.window_blocks is not None:
            self.window_blocks.reserve(request_cache, needed)
        return True

    def allocate_write_slots(self, request_id: str, spare_slots: int = 0) -> bool:
        """Allocate the slots that the next step writes to, as `StateSlots.allocate`; return False if there are none."""
        return self.state_slots.allocate(self._request_caches[request_id], spare_slots)

    def reserve_checkpoints(self, request_id: str, positions: Iterable[int], spare_slots: int = 0) -> None:
        """Allocate slots for checkpoints that the next step writes out within its tokens (`StateSlots.reserve`)."""
        self.state_slots.reserve(self._request_caches[request_id], positions, spare_slots)

    def next_step_slots(
        self, request_id: str, num_computed: int, keeps_checkpoint: bool, spare_slots: int = 0
    ) -> tuple[int, int]:
        """Return the slots that the step after the one in flight reads and writes (`StateSlots.next_step_slots`).

        That step begins with `num_computed` tokens computed. `keeps_checkpoint`: the request keeps checkpoints.
        """
        is_boundary = num_computed % self.block_size == 0
        return self.state_slots.next_step_slots(
            self._request_caches[request_id], keeps_checkpoint and is_boundary, spare_slots
        )

    def use_next_slots(self, request_id: str) -> None:
        """Note that the step in flight is over, and the one after it is in flight now (`StateSlots.use_next_slots`)."""
        self.state_slots.use_next_slots(self._request_caches[request_id])

    def accept_state(self, request_id: str, num_accepted: int = 0) -> None:
        """Note that a step succeeded, and how many of its drafts were accepted (`StateSlots.accept_state`)."""
        self.state_slots.accept_state(self._request_caches[request_id], num_accepted)

    def free_outside_window(self, request_id: str, num_computed: int) -> None:
        """Free the window blocks that no later token sees, after `num_computed` tokens are computed and committed."""
        assert self.window_blocks is not None, "a model without windows has no window blocks"
        self.window_blocks.free_outside_window(self._request_caches[request_id], num_computed)

    def has_full_block(self, request_id: str, num_computed: int) -> bool:
        """Return whether, with `num_computed` tokens computed, the request has a full block to `commit`."""
        request_cache = self._request_caches[request_id]
        return num_computed >= (request_cache.num_indexed + 1) * self.block_size

    def commit(
        self,
        request_id: str,
        block_hashes: BlockHashes,
        num_computed: int,
        positions: CheckpointPositions,
        reaches_end: bool,
        num_accepted: int = 0,
    ) -> None:
        """Commit what a step computed to the index: full blocks, and the checkpoints that are due.

        The first `num_computed` tokens of the request are computed, and `block_hashes` has their block hashes.
        `reaches_end`: the step reached the end of the known tokens, so that the output continues from the state now
        written. `num_accepted` drafts were accepted: write slot i has the state at position `num_computed -
        num_accepted + i`.
        """
        request_cache = self._request_caches[request_id]
        index_blocks_and_states(
            self.store, request_cache, block_hashes, num_computed, positions, reaches_end, num_accepted
        )

    def free(self, request_id: str) -> None:
        """Free all that the request holds. No step may still be writing to it."""
        request_cache = self._request_caches.pop(request_id)
        if request_cache.last_entry is not None:
            self.store.touch(request_cache.last_entry)
            self.store.touch_window(request_cache.last_entry)
        self._free(request_cache)

    def request_cache(self, request_id: str) -> RequestCache:
        """Return the request's blocks and slots, for reading; only this class changes them."""
        return self._request_caches[request_id]

    def request_ids(self) -> set[str]:
        """Return the ids of the requests that hold memory."""
        return set(self._request_caches)

    def usage(self) -> CacheUsage:
        blocks, slots, window_blocks, packed = self.blocks, self.slots, self.store.window_blocks, self.store.packed
        return CacheUsage(
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_idle,
            blocks_total=blocks.capacity,
            slots_used=slots.num_used,
            slots_cached=slots.num_idle + packed.num_idle,
            slots_total=slots.capacity + packed.capacity,
            window_blocks_used=window_blocks.num_used,
            window_blocks_cached=window_blocks.num_idle,
            window_blocks_total=window_blocks.capacity,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless references are exact, and what is shared cannot be written."""
        check_cache_integrity(self.store, self._request_caches, self.state_slots.slots_per_request, self.window_blocks)

    def _attach(self, path: tuple[IndexEntry, ...], uses_checkpoint: bool) -> RequestCache:
        request_cache = RequestCache()
        if not path:
            return request_cache
        if self.blocks.count > 0:
            request_cache.block_table = tuple(entry.block for entry in path)
            self.blocks.retain(request_cache.block_table)
        if self.window_blocks is not None and uses_checkpoint:
            self.window_blocks.attach(request_cache, path)
        request_cache.last_entry, request_cache.num_indexed = path[-1], len(path)
        request_cache.last_entry.num_holders += 1
        request_cache.capacity = len(path) * self.block_size
        if request_cache.last_entry.checkpoint is not None and uses_checkpoint:
            self.state_slots.attach(request_cache, request_cache.last_entry.checkpoint)
        return request_cache

    def _free(self, request_cache: RequestCache) -> None:
        if request_cache.last_entry is not None:
            request_cache.last_entry.num_holders -= 1
        self.blocks.release(request_cache.block_table)
        self.state_slots.free(request_cache)
        if self.window_blocks is not None:
            self.window_blocks.free(request_cache)
