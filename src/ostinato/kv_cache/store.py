"""Store of cache memory: pools of ids with reference counts, and the prefix index over them.

Blocks and slots are such ids; their memory is the runner's. Memory is allocated here, and cached entries are evicted to
make room for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.kv_cache.eviction import (
    EvictionCosts,
    EvictionPolicy,
    EvictionQueue,
    checkpoint_utility,
    leaf_utility,
    utility_tier,
    window_block_utility,
)
from ostinato.kv_cache.marks import PinRegistry
from ostinato.kv_cache.offload.file_tier import FileTier
from ostinato.kv_cache.prefix_index import BlockHashes, Checkpoint, IndexEntry, PrefixIndex, RecentKeys, WindowBlock
from ostinato.kv_cache.request_cache import CacheMemory, PackedStates
from ostinato.observe.counts import StoreCounts

log = logging.getLogger("ostinato.cache")


class IdPool:
    """Allocator of the ids 1 to `count - 1`; id 0 is the null id, which has no owner and is never allocated.

    Requests hold references: `allocate` sets an id's count to 1, `retain` and `release` change it. Besides, the prefix
    index may *keep* an id. An id that is kept and not referenced is *idle*: it holds something that can be found again,
    and the index can evict it when its memory is needed. An id that is neither is free. Every operation costs O(1) per
    id. The order is deterministic: a new pool allocates the lowest ids first, later the ids that became free last.

    A `count` of 0 means that the model has no such memory; nothing can be allocated, and nothing needs to be. Freeing
    an id that is not held is a bug in the caller, and an AssertionError.
    """

    def __init__(self, name: str, count: int) -> None:
        assert count >= 0, f"a pool cannot have {count} {name}s"
        self.name = name
        self.count = count
        self._references = [0] * count
        self._cached = bytearray(count)
        self._num_idle = 0
        # A stack: the id that is allocated next is at the end.
        self._free = list(range(count - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Number of ids that can be in use at once: all but the null id."""
        return max(self.count - 1, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of ids kept by the index and not referenced."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Number of ids that are free, or would be after dropping idle ones."""
        return len(self._free) + self._num_idle

    @property
    def num_used(self) -> int:
        """Number of ids referenced by requests."""
        return self.capacity - len(self._free) - self._num_idle

    def references(self, id: int) -> int:
        return self._references[id]

    def is_cached(self, id: int) -> bool:
        return bool(self._cached[id])

    def is_idle(self, id: int) -> bool:
        return bool(self._cached[id]) and self._references[id] == 0

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` ids, each with one reference; return None, and allocate nothing, if fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        allocated_ids = self._free[-count:]
        del self._free[-count:]
        allocated_ids.reverse()
        for id in allocated_ids:
            self._references[id] = 1
        return allocated_ids

    def retain(self, ids: Iterable[int]) -> None:
        """Add one reference to each of `ids`, which are all referenced or kept."""
        for id in ids:
            self._check_in_use(id)
            self._num_idle -= self._references[id] == 0
            self._references[id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Drop one reference from each of `ids`; the first of those that become free is allocated next."""
        for id in reversed(ids):
            self._check_referenced(id)
            self._references[id] -= 1
            if self._references[id] == 0:
                if self._cached[id]:
                    self._num_idle += 1
                else:
                    self._free.append(id)

    def mark_cached(self, id: int) -> None:
        """Let the index keep an id that is referenced; it stays when the last reference goes."""
        self._check_referenced(id)
        assert not self._cached[id], f"{self.name} {id} is in the index already"
        self._cached[id] = 1

    def unmark_cached(self, id: int) -> None:
        """Let the index drop an id that it keeps, which is free then unless it is referenced."""
        assert self._cached[id], f"{self.name} {id} is not in the index"
        self._cached[id] = 0
        if self._references[id] == 0:
            self._num_idle -= 1
            self._free.append(id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each id but the null one is free, or referenced, or kept. O(count)."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.name} is twice in the free list"
        assert 0 not in free, f"the null {self.name} is in the free list"
        assert not self._references or self._references[0] == 0, f"the null {self.name} is referenced"
        assert not self._cached or not self._cached[0], f"the null {self.name} is in the index"
        for id in range(1, self.count):
            references = self._references[id]
            in_use = references > 0 or bool(self._cached[id])
            assert references >= 0, f"{self.name} {id} has {references} references"
            assert not in_use or id not in free, f"{self.name} {id} is both free and in use"
            assert in_use or id in free, f"{self.name} {id} is neither free nor in use: it leaked"
        idle = sum(map(self.is_idle, range(1, self.count)))
        assert idle == self._num_idle, f"{idle} {self.name}s are idle, and {self._num_idle} were counted"

    def _check_in_use(self, id: int) -> None:
        assert 0 < id < self.count, f"{self.name} {id} is not one of the pool's"
        assert self._references[id] > 0 or self._cached[id], f"{self.name} {id} is not in use"

    def _check_referenced(self, id: int) -> None:
        assert 0 < id < self.count, f"{self.name} {id} is not one of the pool's"
        assert self._references[id] > 0, f"{self.name} {id} is not in use"


MAX_ENTRIES_WITHOUT_BLOCKS = 2**16
"""Entries of a model without blocks (no attention, or windows in all layers): no memory bounds their number."""

MAX_EVICTED_KEYS = 2**16


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a prompt.

    `path` are the entries to attach, up to the hit. `matched` are the entries of all indexed blocks of the prompt. They
    extend beyond the hit if a checkpoint or window blocks are missing there; `num_matched` counts their tokens.
    """

    path: tuple[IndexEntry, ...] = ()
    matched: tuple[IndexEntry, ...] = ()
    hit_without_window: int = 0
    """Tokens that a hit would have if no window block were gone; 0 in a model without windows."""

    @property
    def hit(self) -> int:
        """Tokens that need not be computed."""
        return self.path[-1].end if self.path else 0

    @property
    def num_matched(self) -> int:
        return self.matched[-1].end if self.matched else 0


class CacheStore:
    """Blocks, slots and window blocks, referenced by requests or kept by the index.

    An entry owns its block, its checkpoint's slot and its window block as long as it is in the index; requests that use
    them hold references too. Only memory without references is evicted: blocks from the leaves backwards, slots and
    window blocks anywhere.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        policy: EvictionPolicy,
        costs: EvictionCosts,
        num_window_blocks: int = 0,
        blocks_per_window: int = 0,
        max_pins: int = 0,
        max_pinned_blocks: int = 0,
        num_packed: int = 0,
    ) -> None:
        self.blocks = IdPool("block", num_blocks)
        self.slots = IdPool("slot", num_slots)
        self.packed = IdPool("packed checkpoint", num_packed + 1 if num_packed else 0)
        self.packed_states = PackedStates(self.packed.count)
        self.window_blocks = IdPool("window block", num_window_blocks)
        self.blocks_per_window = blocks_per_window
        """Window blocks that a request needs to continue at a block's first token."""
        self.index = PrefixIndex()
        self.evicted_keys = RecentKeys(MAX_EVICTED_KEYS)
        self.damaged_keys = RecentKeys(MAX_EVICTED_KEYS)
        self.counters = StoreCounts()
        self.pins = PinRegistry(self.counters, max_pins, max_pinned_blocks, blocks_per_window)
        self.files: FileTier | None = None
        """The file tier for what is evicted; None without one."""
        self.memory: CacheMemory | None = None
        """The memory of the blocks, window blocks and slots; None if nothing is imported, exported or packed."""
        self.costs = costs
        self._clock = 0
        index = self.index
        self._leaves: EvictionQueue[IndexEntry] = EvictionQueue(
            policy,
            lambda: (entry for entry in index.leaves if entry.num_holders == 0),
            lambda entry: leaf_utility(entry, costs, num_slots > 0, index, self.blocks_per_window > 0),
            lambda entry: entry.is_evictable and entry in index,
        )
        self._checkpoints = self._checkpoint_queue(policy, packed=False)
        self._packed_checkpoints = self._checkpoint_queue(policy, packed=True)
        self._window_blocks: EvictionQueue[WindowBlock] = EvictionQueue(
            policy,
            lambda: (
                window_block for window_block in index.window_blocks if self.window_blocks.is_idle(window_block.id)
            ),
            lambda window_block: window_block_utility(window_block, costs, max(self.blocks_per_window, 1)),
            lambda window_block: (
                index.window_block_of(window_block.id) is window_block and self.window_blocks.is_idle(window_block.id)
            ),
        )

    @property
    def now(self) -> int:
        """Clock for recency: the number of times that a prefix was taken up or left."""
        return self._clock

    @property
    def num_unpinned_slots(self) -> int:
        """Number of slots that are free, or would be after dropping idle checkpoints that are not pinned.

        A pinned checkpoint that can be packed does not keep its slot.
        """
        if not self.pins.pinned or self.packed.count:
            return self.slots.num_available
        pinned = [entry.checkpoint for entry in self.pins.pinned if entry.checkpoint is not None]
        return self.slots.num_available - sum(self.slots.is_idle(checkpoint.slot) for checkpoint in pinned)

    @property
    def num_checkpoint_places(self) -> int:
        """Number of slots and packed places that checkpoints can have."""
        return self.num_unpinned_slots + self.packed.num_available

    def match(self, block_hashes: BlockHashes, limit: int) -> Match:
        """Return the indexed part of the first `limit` tokens. Changes nothing."""
        matched = tuple(self.index.walk(block_hashes, limit // block_hashes.block_size))
        if not self.window_blocks.count:
            depth = len(matched)
            while self.slots.count and depth and matched[depth - 1].checkpoint is None:
                depth -= 1
            return Match(matched[:depth], matched)
        depth = reach = num_window_blocks = 0
        for index, entry in enumerate(matched, start=1):
            num_window_blocks = 0 if entry.window_block is None else num_window_blocks + 1
            if entry.checkpoint is not None or not self.slots.count:
                reach = entry.end
                depth = index if num_window_blocks >= min(self.blocks_per_window, index) else depth
        return Match(matched[:depth], matched, reach)

    def can_hit(self, entry: IndexEntry) -> bool:
        """Return whether a prompt that shares the tokens up to `entry`, and no more, can use them."""
        has_window = all(inside.window_block is not None for inside in self.window_entries(entry))
        return has_window and (entry.checkpoint is not None or self.slots.count == 0)

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks, which are available."""
        while self.blocks.num_free < count:
            entry = self._leaves.pop()
            assert entry is not None, "no block is free or evictable, though so many were counted"
            self._evict(entry)
        allocated_ids = self.blocks.allocate(count)
        assert allocated_ids is not None, "free blocks were counted above"
        return allocated_ids

    def allocate_slots(self, count: int) -> list[int]:
        """Allocate `count` slots, which are available."""
        while self.slots.num_free < count:
            checkpoint = self._checkpoints.pop()
            assert checkpoint is not None, "no slot is free or evictable, though so many were counted"
            if not self._pack(checkpoint):
                self.evict_checkpoint(checkpoint)
        allocated_ids = self.slots.allocate(count)
        assert allocated_ids is not None, "free slots were counted above"
        return allocated_ids

    def allocate_window_blocks(self, count: int) -> list[int]:
        """Allocate `count` window blocks, which were reserved."""
        while self.window_blocks.num_free < count:
            window_block = self._window_blocks.pop()
            assert window_block is not None, "no window block is free or evictable, though so many were reserved"
            self.counters.evicted_window_blocks += 1
            if window_block.entry.num_windows_pinned:
                self.pins.lose_window(window_block.entry)
            self._save_window_block(window_block)
            self._drop_window_block(window_block)
        allocated_ids = self.window_blocks.allocate(count)
        assert allocated_ids is not None, "free window blocks were counted above"
        return allocated_ids

    def release_window_blocks(self, ids: Sequence[int]) -> None:
        """Free window blocks of a request. Those that only the index keeps may be evicted from now on."""
        self.window_blocks.release(ids)
        for id in ids:
            window_block = self.index.window_block_of(id)
            if window_block is not None and self.window_blocks.is_idle(id):
                self._window_blocks.push(window_block)

    def add_window_block(self, entry: IndexEntry, id: int) -> None:
        """Keep window block `id`, which a request has written, for the entry, which has none."""
        self.window_blocks.mark_cached(id)
        self.damaged_keys.discard(entry.key)
        self.index.add_window_block(entry, id, self._clock)

    def touch_window(self, entry: IndexEntry | None, is_hit: bool = False) -> None:
        """Note that a prefix ends, continues or branches off after `entry`, which needs its window blocks for that."""
        for window_entry in self.window_entries(entry):
            if window_entry.window_block is not None:
                window_entry.window_block.is_interior = False
                window_entry.window_block.last_use = self._clock
                window_entry.window_block.hits += is_hit

    def window_entries(self, entry: IndexEntry | None) -> Iterator[IndexEntry]:
        """Yield entries whose window blocks a request needs after `entry`, the last first; none without windows."""
        for _ in range(self.blocks_per_window):
            if entry is None:
                break
            yield entry
            entry = entry.parent

    def add_block(
        self, parent: IndexEntry | None, block_hashes: BlockHashes, index: int, block: int
    ) -> IndexEntry | None:
        """Index block `index` of `block_hashes`, computed into `block`; return None if other tokens have its hash."""
        entry = self.index.add(parent, block_hashes, index, block, self._clock)
        if entry is None:
            return None
        self.evicted_keys.discard(entry.key)
        self.damaged_keys.discard(entry.key)
        if block:
            self.blocks.mark_cached(block)
        return entry

    def trim(self) -> None:
        """Keep the index of a model without blocks within bounds, as far as running requests let it."""
        while self.blocks.count == 0 and len(self.index) > MAX_ENTRIES_WITHOUT_BLOCKS:
            entry = self._leaves.pop()
            if entry is None:
                break
            self._evict(entry)

    def add_checkpoint(self, entry: IndexEntry, slot: int, is_interior: bool) -> Checkpoint | None:
        """Keep `slot`, which a request has written, as the entry's checkpoint; return None if it has one already."""
        if entry.checkpoint is not None:
            return None
        self.slots.mark_cached(slot)
        self.damaged_keys.discard(entry.key)
        self.counters.checkpoints_taken += 1
        log.debug("kept slot %d as the checkpoint at %d", slot, entry.end)
        return self.index.add_checkpoint(entry, slot, is_interior, self._clock)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index because it is not wanted any more."""
        if checkpoint.entry.pin is not None:
            self.pins.lose(checkpoint.entry)
        self.index.remove_checkpoint(checkpoint)
        if checkpoint.slot < 0:
            self.packed.unmark_cached(-checkpoint.slot)
        else:
            self.slots.unmark_cached(checkpoint.slot)

    def evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index because its slot is needed."""
        self.counters.evicted_checkpoints += 1
        log.debug("evicted the checkpoint at %d in slot %d", checkpoint.entry.end, checkpoint.slot)
        checkpoint.entry.lost_checkpoint = True
        if self.files is not None and self.files.save_window(self.window_entries(checkpoint.entry)):
            self.save_state(checkpoint)
        self.drop_checkpoint(checkpoint)

    def save_state(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint in files, whether it is packed or not."""
        assert self.files is not None, "without a file tier nothing is kept there"
        packed = self._contents(checkpoint) if checkpoint.slot < 0 else None
        self.files.save_state(checkpoint.entry, checkpoint.slot, packed)

    def retain_packed(self, id: int) -> None:
        """Keep the packed checkpoint `id` where it is until `unpack`, or until it is released."""
        self.packed.retain((id,))

    def unpack(self, id: int, slot: int) -> None:
        """Copy the packed checkpoint `id`, which is retained, to `slot`, and release it."""
        assert self.memory is not None, "a packed checkpoint came from memory"
        self.packed_states.unpack(self.memory, id, slot)
        self.counters.unpacked_checkpoints += 1
        self.packed.release((id,))

    def clear(self) -> bool:
        """Remove all that no request holds as if never seen; return whether nothing is left. O(entries)."""
        self.pins.clear()
        for checkpoint in [each for each in self.index.checkpoints if self._is_idle(each, packed=each.slot < 0)]:
            self.drop_checkpoint(checkpoint)
        for window_block in [each for each in self.index.window_blocks if self.window_blocks.is_idle(each.id)]:
            self._drop_window_block(window_block)
        leaves = list(self.index.leaves)
        while leaves:
            entry = leaves.pop()
            if not entry.is_evictable or entry.checkpoint is not None:
                continue
            self._remove(entry)
            if entry.parent is not None:
                leaves.append(entry.parent)
        for entry in self.index:
            entry.lost_checkpoint = False
        self.evicted_keys = RecentKeys(MAX_EVICTED_KEYS)
        self.damaged_keys = RecentKeys(MAX_EVICTED_KEYS)
        if self.files is not None:
            self.files.directory.clear()
        if len(self.index):
            return False
        self.index.note_cleared()
        return True

    def touch(self, entry: IndexEntry | None) -> None:
        """Note that the prefix up to `entry` was used now. O(its blocks)."""
        self._clock += 1
        while entry is not None:
            entry.last_use = self._clock
            entry = entry.parent

    def check_integrity(self) -> None:
        """Raise AssertionError unless pools and index agree. O(blocks + slots + window blocks + entries)."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        self.packed.check_integrity()
        self.window_blocks.check_integrity()
        self.index.check_integrity()
        self.pins.check_integrity()
        for entry in self.pins.pinned:
            assert entry in self.index, "a pinned entry is not in the index"
            assert not self.slots.count or entry.checkpoint is not None, "a pinned entry has no checkpoint"
        blocks = {entry.block for entry in self.index if entry.block}
        slots = {checkpoint.slot for checkpoint in self.index.checkpoints if checkpoint.slot > 0}
        packed = {-checkpoint.slot for checkpoint in self.index.checkpoints if checkpoint.slot < 0}
        window_blocks = {window_block.id for window_block in self.index.window_blocks}
        assert self.blocks.count or not blocks, "a model without attention has blocks in the index"
        assert not self.blocks.count or len(blocks) == len(self.index), "two entries have one block, or one has none"
        pools = (self.blocks, self.slots, self.packed, self.window_blocks)
        for pool, ids in zip(pools, (blocks, slots, packed, window_blocks), strict=True):
            cached_ids = {id for id in range(pool.count) if pool.is_cached(id)}
            assert cached_ids == ids, f"the index has other {pool.name}s than the pool keeps for it"

    def _checkpoint_queue(self, policy: EvictionPolicy, *, packed: bool) -> EvictionQueue[Checkpoint]:
        index, costs = self.index, self.costs
        return EvictionQueue(
            policy,
            lambda: (checkpoint for checkpoint in index.checkpoints if self._is_idle(checkpoint, packed)),
            lambda checkpoint: checkpoint_utility(checkpoint, costs, index),
            lambda checkpoint: index.checkpoint_of(checkpoint.slot) is checkpoint and self._is_idle(checkpoint, packed),
        )

    def _is_idle(self, checkpoint: Checkpoint, packed: bool) -> bool:
        """Return whether a checkpoint, which is in a slot or `packed`, is not referenced."""
        if (checkpoint.slot < 0) != packed:
            return False
        return self.packed.is_idle(-checkpoint.slot) if packed else self.slots.is_idle(checkpoint.slot)

    def _contents(self, checkpoint: Checkpoint) -> memoryview:
        assert self.memory is not None, "a packed checkpoint came from memory"
        return self.packed_states.contents(self.memory, -checkpoint.slot)

    def _pack(self, checkpoint: Checkpoint) -> bool:
        """Pack an idle checkpoint, so that its slot becomes free.

        It takes the place of the least useful packed one if none is free. Return False, with nothing changed, if it is
        itself of less use than all of them.
        """
        if not self.packed.count or self.memory is None:
            return False
        if not self.packed.num_free:
            other = self._packed_checkpoints.pop()
            if other is None:
                return False
            if utility_tier(checkpoint) < utility_tier(other):
                self._packed_checkpoints.push(other)
                return False
            self.evict_checkpoint(other)
        allocated_ids = self.packed.allocate(1)
        assert allocated_ids is not None, "a place was made free above"
        [id] = allocated_ids
        self.packed_states.pack(self.memory, checkpoint.slot, id)
        self.packed.mark_cached(id)
        slot = checkpoint.slot
        self.index.move_checkpoint(checkpoint, -id)
        self.packed.release((id,))
        self.slots.unmark_cached(slot)
        self.counters.packed_checkpoints += 1
        log.debug("packed the checkpoint at %d in place %d", checkpoint.entry.end, id)
        return True

    def _evict(self, entry: IndexEntry) -> None:
        """Remove a leaf from the index because its block is needed."""
        if entry.checkpoint is not None:
            self.evict_checkpoint(entry.checkpoint)
        if self.files is not None and entry.block:
            self.files.save_block(entry)
        if entry.window_block is not None:
            self._save_window_block(entry.window_block)
        self._remove(entry)
        self.evicted_keys.add(entry.key)
        self.counters.evicted_blocks += 1
        log.debug("evicted block %d, which ends at %d", entry.block, entry.end)
        if entry.parent is not None and entry.parent.is_evictable:
            self._leaves.push(entry.parent)

    def _save_window_block(self, window_block: WindowBlock) -> None:
        """Keep a window block in files if a prefix is known to end or continue so near behind it that it is needed."""
        if self.files is not None and utility_tier(window_block) > 0:
            self.files.save_window_block(window_block.entry, window_block.id)

    def _drop_window_block(self, window_block: WindowBlock) -> None:
        self.index.remove_window_block(window_block)
        self.window_blocks.unmark_cached(window_block.id)

    def _remove(self, entry: IndexEntry) -> None:
        if entry.pin is not None:
            self.pins.lose(entry)
        if entry.window_block is not None:
            self._drop_window_block(entry.window_block)
        self.index.remove(entry)
        if entry.block:
            self.blocks.unmark_cached(entry.block)
