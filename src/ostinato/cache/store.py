"""The pools and the index over them: memory is allocated here, and cached entries make room for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ostinato.cache.chain import BlockHashes
from ostinato.cache.eviction import (
    EvictionCosts,
    EvictionPolicy,
    EvictionQueue,
    utility_tier,
    checkpoint_utility,
    leaf_utility,
    window_block_utility,
)
from ostinato.cache.files.tier import FileTier
from ostinato.cache.index import Checkpoint, IndexEntry, WindowBlock, PrefixIndex
from ostinato.cache.pane_rules import SlidingWindowSpec
from ostinato.cache.pool import IdPool
from ostinato.cache.report import RecentKeys
from ostinato.observe.cache_counts import StoreCounts

MAX_ENTRIES_WITHOUT_BLOCKS = 2**16
"""Entries of a model without blocks (no attention, or windows in all layers): no memory bounds their number."""

MAX_EVICTED_KEYS = 2**16


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a prompt.

    `path` are the entries to attach, up to the hit; `num_matched` counts the tokens of all indexed blocks, which extend
    beyond the hit if a checkpoint or window blocks are missing there.
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
        num_panes: int = 0,
        pane_rules: SlidingWindowSpec | None = None,
    ) -> None:
        self.blocks = IdPool("block", num_blocks)
        self.slots = IdPool("slot", num_slots)
        self.window_blocks = IdPool("pane", num_panes)
        self.blocks_per_window = 0 if pane_rules is None else pane_rules.blocks_per_window
        """Window blocks that a request needs to continue at a block's first token."""
        self.index = PrefixIndex()
        self.evicted_keys = RecentKeys(MAX_EVICTED_KEYS)
        self.damaged_keys = RecentKeys(MAX_EVICTED_KEYS)
        self.counters = StoreCounts()
        self.files: FileTier | None = None
        """The file tier for what is evicted; None without one."""
        self.costs = costs
        self._clock = 0
        index = self.index
        self._leaves: EvictionQueue[IndexEntry] = EvictionQueue(
            policy,
            lambda: (entry for entry in index.leaves if entry.num_pins == 0),
            lambda entry: leaf_utility(entry, costs, num_slots > 0, index, self.blocks_per_window > 0),
            lambda entry: entry.is_evictable and entry in index,
        )
        self._checkpoints: EvictionQueue[Checkpoint] = EvictionQueue(
            policy,
            lambda: (each for each in index.checkpoints if self.slots.is_idle(each.slot)),
            lambda checkpoint: checkpoint_utility(checkpoint, costs, index),
            lambda each: index.checkpoint_of(each.slot) is each and self.slots.is_idle(each.slot),
        )
        self._panes: EvictionQueue[WindowBlock] = EvictionQueue(
            policy,
            lambda: (pane for pane in index.window_blocks if self.window_blocks.is_idle(pane.id)),
            lambda pane: window_block_utility(pane, costs, max(self.blocks_per_window, 1)),
            lambda pane: index.window_block_of(pane.id) is pane and self.window_blocks.is_idle(pane.id),
        )

    @property
    def now(self) -> int:
        """Clock for recency: the number of times that a prefix was taken up or left."""
        return self._clock

    def match(self, chain: BlockHashes, limit: int) -> Match:
        """Return the indexed part of the first `limit` tokens. Changes nothing."""
        matched = tuple(self.index.walk(chain, limit // chain.block_size))
        if not self.window_blocks.count:
            depth = len(matched)
            while self.slots.count and depth and matched[depth - 1].checkpoint is None:
                depth -= 1
            return Match(matched[:depth], matched)
        depth = reach = num_panes = 0
        for index, entry in enumerate(matched, start=1):
            num_panes = 0 if entry.window_block is None else num_panes + 1
            if entry.checkpoint is not None or not self.slots.count:
                reach = entry.end
                depth = index if num_panes >= min(self.blocks_per_window, index) else depth
        return Match(matched[:depth], matched, reach)

    def allocate_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks, which are available."""
        while self.blocks.num_free < count:
            entry = self._leaves.pop()
            assert entry is not None, "no block is free or evictable, though so many were counted"
            self._evict(entry)
        taken = self.blocks.allocate(count)
        assert taken is not None, "free blocks were counted above"
        return taken

    def allocate_slots(self, count: int) -> list[int]:
        """Allocate `count` slots, which are available."""
        while self.slots.num_free < count:
            checkpoint = self._checkpoints.pop()
            assert checkpoint is not None, "no slot is free or evictable, though so many were counted"
            self.evict_checkpoint(checkpoint)
        taken = self.slots.allocate(count)
        assert taken is not None, "free slots were counted above"
        return taken

    def allocate_window_blocks(self, count: int) -> list[int]:
        """Allocate `count` window blocks, which were promised."""
        while self.window_blocks.num_free < count:
            pane = self._panes.pop()
            assert pane is not None, "no pane is free or evictable, though so many were promised"
            self.counters.evicted_panes += 1
            self._save_pane(pane)
            self._drop_pane(pane)
        taken = self.window_blocks.allocate(count)
        assert taken is not None, "free panes were counted above"
        return taken

    def release_window_blocks(self, ids: Sequence[int]) -> None:
        """Free window blocks of a request. Those that only the index keeps may be evicted from now on."""
        self.window_blocks.release(ids)
        for id in ids:
            pane = self.index.window_block_of(id)
            if pane is not None and self.window_blocks.is_idle(id):
                self._panes.push(pane)

    def add_window_block(self, entry: IndexEntry, id: int) -> None:
        """Keep window block `id`, which a request has written, for the entry, which has none."""
        self.window_blocks.mark_cached(id)
        self.damaged_keys.discard(entry.key)
        self.index.add_window_block(entry, id, self._clock)

    def touch_window(self, entry: IndexEntry | None, is_hit: bool = False) -> None:
        """Note that a prefix ends, continues or branches off after `entry`, which needs its window blocks for that."""
        for each in self.window_entries(entry):
            if each.window_block is not None:
                each.window_block.is_interior = False
                each.window_block.last_use = self._clock
                each.window_block.hits += is_hit

    def window_entries(self, entry: IndexEntry | None) -> Iterator[IndexEntry]:
        """Yield the entries whose window blocks a request needs to continue after `entry`, the last one first.

        Without windows there are none.
        """
        for _ in range(self.blocks_per_window):
            if entry is None:
                break
            yield entry
            entry = entry.parent

    def add_block(self, parent: IndexEntry | None, chain: BlockHashes, index: int, block: int) -> IndexEntry | None:
        """Index block `index` of `block_hashes`, computed into `block`; return None if other tokens have its hash."""
        entry = self.index.add(parent, chain, index, block, self._clock)
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
        return self.index.add_checkpoint(entry, slot, is_interior, self._clock)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index because it is not wanted any more."""
        self.index.remove_checkpoint(checkpoint)
        self.slots.unmark_cached(checkpoint.slot)

    def evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index because its slot is needed."""
        self.counters.evicted_checkpoints += 1
        checkpoint.entry.lost_checkpoint = True
        if self.files is not None and self.files.save_window(self.window_entries(checkpoint.entry)):
            self.files.save_state(checkpoint.entry, checkpoint.slot)
        self.drop_checkpoint(checkpoint)

    def clear(self) -> bool:
        """Remove all that no request holds, as if it had never been seen; return whether nothing is left.

        O(entries).
        """
        for checkpoint in [each for each in self.index.checkpoints if self.slots.is_idle(each.slot)]:
            self.drop_checkpoint(checkpoint)
        for pane in [each for each in self.index.window_blocks if self.window_blocks.is_idle(each.id)]:
            self._drop_pane(pane)
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
        return len(self.index) == 0

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
        self.window_blocks.check_integrity()
        self.index.check_integrity()
        blocks = {entry.block for entry in self.index if entry.block}
        slots = {checkpoint.slot for checkpoint in self.index.checkpoints}
        panes = {pane.id for pane in self.index.window_blocks}
        assert self.blocks.count or not blocks, "a model without attention has blocks in the index"
        assert not self.blocks.count or len(blocks) == len(self.index), "two entries have one block, or one has none"
        for pool, ids in ((self.blocks, blocks), (self.slots, slots), (self.window_blocks, panes)):
            kept = {id for id in range(pool.count) if pool.is_cached(id)}
            assert kept == ids, f"the index has other {pool.name}s than the pool keeps for it"

    def _evict(self, entry: IndexEntry) -> None:
        """Remove a leaf from the index because its block is needed."""
        if entry.checkpoint is not None:
            self.evict_checkpoint(entry.checkpoint)
        if self.files is not None and entry.block:
            self.files.save_block(entry)
        if entry.window_block is not None:
            self._save_pane(entry.window_block)
        self._remove(entry)
        self.evicted_keys.add(entry.key)
        self.counters.evicted_blocks += 1
        if entry.parent is not None and entry.parent.is_evictable:
            self._leaves.push(entry.parent)

    def _save_pane(self, pane: WindowBlock) -> None:
        """Keep a window block in files if a prefix is known to end or continue so near behind it that it is needed."""
        if self.files is not None and utility_tier(pane) > 0:
            self.files.save_window_block(pane.entry, pane.id)

    def _drop_pane(self, pane: WindowBlock) -> None:
        self.index.remove_window_block(pane)
        self.window_blocks.unmark_cached(pane.id)

    def _remove(self, entry: IndexEntry) -> None:
        if entry.window_block is not None:
            self._drop_pane(entry.window_block)
        self.index.remove(entry)
        if entry.block:
            self.blocks.unmark_cached(entry.block)
