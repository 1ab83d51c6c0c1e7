"""The pools and the index over them: memory is allocated here, and cached entries make room for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ostinato.cache.chain import Chain
from ostinato.cache.eviction import (
    EvictionCosts,
    EvictionPolicy,
    EvictionQueue,
    tier_of,
    worth_of_checkpoint,
    worth_of_leaf,
    worth_of_pane,
)
from ostinato.cache.files.tier import FileTier
from ostinato.cache.index import Checkpoint, Entry, Pane, PrefixIndex
from ostinato.cache.pane_rules import PaneRules
from ostinato.cache.pool import Pool
from ostinato.cache.report import EvictedKeys
from ostinato.observe.cache_counts import StoreCounts

MOST_ENTRIES_WITHOUT_BLOCKS = 2**16
"""Entries of a model without blocks (no attention, or windows in all layers): no memory bounds their number."""

MOST_EVICTED_KEYS = 2**16


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a prompt.

    `path` are the entries to attach, up to the hit; `num_matched` counts the tokens of all indexed blocks, which extend
    beyond the hit if a checkpoint or window blocks are missing there.
    """

    path: tuple[Entry, ...] = ()
    matched: tuple[Entry, ...] = ()
    reach: int = 0
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
        pane_rules: PaneRules | None = None,
    ) -> None:
        self.blocks = Pool("block", num_blocks)
        self.slots = Pool("slot", num_slots)
        self.panes = Pool("pane", num_panes)
        self.of_window = 0 if pane_rules is None else pane_rules.of_window
        """Window blocks that a request needs to continue at a block's first token."""
        self.index = PrefixIndex()
        self.evicted_keys = EvictedKeys(MOST_EVICTED_KEYS)
        self.damaged_keys = EvictedKeys(MOST_EVICTED_KEYS)
        self.counters = StoreCounts()
        self.files: FileTier | None = None
        """The file tier for what is evicted; None without one."""
        self.costs = costs
        self._clock = 0
        index = self.index
        self._leaves: EvictionQueue[Entry] = EvictionQueue(
            policy,
            lambda: (entry for entry in index.leaves if entry.num_pins == 0),
            lambda entry: worth_of_leaf(entry, costs, num_slots > 0, index, self.of_window > 0),
            lambda entry: entry.is_evictable and entry in index,
        )
        self._checkpoints: EvictionQueue[Checkpoint] = EvictionQueue(
            policy,
            lambda: (each for each in index.checkpoints if self.slots.is_idle(each.slot)),
            lambda checkpoint: worth_of_checkpoint(checkpoint, costs, index),
            lambda each: index.checkpoint_of(each.slot) is each and self.slots.is_idle(each.slot),
        )
        self._panes: EvictionQueue[Pane] = EvictionQueue(
            policy,
            lambda: (pane for pane in index.panes if self.panes.is_idle(pane.id)),
            lambda pane: worth_of_pane(pane, costs, max(self.of_window, 1)),
            lambda pane: index.pane_of(pane.id) is pane and self.panes.is_idle(pane.id),
        )

    @property
    def now(self) -> int:
        """Clock for recency: the number of times that a prefix was taken up or left."""
        return self._clock

    def match(self, chain: Chain, limit: int) -> Match:
        """Return the indexed part of the first `limit` tokens. Changes nothing."""
        matched = tuple(self.index.walk(chain, limit // chain.block_size))
        if not self.panes.count:
            depth = len(matched)
            while self.slots.count and depth and matched[depth - 1].checkpoint is None:
                depth -= 1
            return Match(matched[:depth], matched)
        depth = reach = num_panes = 0
        for index, entry in enumerate(matched, start=1):
            num_panes = 0 if entry.pane is None else num_panes + 1
            if entry.checkpoint is not None or not self.slots.count:
                reach = entry.end
                depth = index if num_panes >= min(self.of_window, index) else depth
        return Match(matched[:depth], matched, reach)

    def take_blocks(self, count: int) -> list[int]:
        """Allocate `count` blocks, which are available."""
        while self.blocks.num_free < count:
            entry = self._leaves.pop()
            assert entry is not None, "no block is free or evictable, though so many were counted"
            self._evict(entry)
        taken = self.blocks.allocate(count)
        assert taken is not None, "free blocks were counted above"
        return taken

    def take_slots(self, count: int) -> list[int]:
        """Allocate `count` slots, which are available."""
        while self.slots.num_free < count:
            checkpoint = self._checkpoints.pop()
            assert checkpoint is not None, "no slot is free or evictable, though so many were counted"
            self.evict_checkpoint(checkpoint)
        taken = self.slots.allocate(count)
        assert taken is not None, "free slots were counted above"
        return taken

    def take_panes(self, count: int) -> list[int]:
        """Allocate `count` window blocks, which were promised."""
        while self.panes.num_free < count:
            pane = self._panes.pop()
            assert pane is not None, "no pane is free or evictable, though so many were promised"
            self.counters.evicted_panes += 1
            self._save_pane(pane)
            self._drop_pane(pane)
        taken = self.panes.allocate(count)
        assert taken is not None, "free panes were counted above"
        return taken

    def release_panes(self, ids: Sequence[int]) -> None:
        """Free window blocks of a request. Those that only the index keeps may be evicted from now on."""
        self.panes.release(ids)
        for id in ids:
            pane = self.index.pane_of(id)
            if pane is not None and self.panes.is_idle(id):
                self._panes.offer(pane)

    def keep_pane(self, entry: Entry, id: int) -> None:
        """Keep window block `id`, which a request has written, for the entry, which has none."""
        self.panes.keep(id)
        self.damaged_keys.discard(entry.key)
        self.index.place_pane(entry, id, self._clock)

    def use_window(self, entry: Entry | None, is_hit: bool = False) -> None:
        """Note that a prefix ends, continues or branches off after `entry`, which needs its window blocks for that."""
        for each in self.window_of(entry):
            if each.pane is not None:
                each.pane.is_interior = False
                each.pane.last_use = self._clock
                each.pane.hits += is_hit

    def window_of(self, entry: Entry | None) -> Iterator[Entry]:
        """Yield the entries whose window blocks a request needs to continue after `entry`, the last one first.

        Without windows there are none.
        """
        for _ in range(self.of_window):
            if entry is None:
                break
            yield entry
            entry = entry.parent

    def enter(self, parent: Entry | None, chain: Chain, index: int, block: int) -> Entry | None:
        """Index block `index` of `chain`, computed into `block`; return None if other tokens have its hash."""
        entry = self.index.add(parent, chain, index, block, self._clock)
        if entry is None:
            return None
        self.evicted_keys.discard(entry.key)
        self.damaged_keys.discard(entry.key)
        if block:
            self.blocks.keep(block)
        return entry

    def trim(self) -> None:
        """Keep the index of a model without blocks within bounds, as far as running requests let it."""
        while self.blocks.count == 0 and len(self.index) > MOST_ENTRIES_WITHOUT_BLOCKS:
            entry = self._leaves.pop()
            if entry is None:
                break
            self._evict(entry)

    def place(self, entry: Entry, slot: int, is_interior: bool) -> Checkpoint | None:
        """Keep `slot`, which a request has written, as the entry's checkpoint; return None if it has one already."""
        if entry.checkpoint is not None:
            return None
        self.slots.keep(slot)
        self.damaged_keys.discard(entry.key)
        self.counters.checkpoints_taken += 1
        return self.index.place(entry, slot, is_interior, self._clock)

    def give_up(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index because it is not wanted any more."""
        self.index.displace(checkpoint)
        self.slots.drop(checkpoint.slot)

    def evict_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the index because its slot is needed."""
        self.counters.evicted_checkpoints += 1
        checkpoint.entry.lost_checkpoint = True
        if self.files is not None and self.files.save_window(self.window_of(checkpoint.entry)):
            self.files.save_state(checkpoint.entry, checkpoint.slot)
        self.give_up(checkpoint)

    def forget(self) -> bool:
        """Remove all that no request holds, as if it had never been seen; return whether nothing is left.

        O(entries).
        """
        for checkpoint in [each for each in self.index.checkpoints if self.slots.is_idle(each.slot)]:
            self.give_up(checkpoint)
        for pane in [each for each in self.index.panes if self.panes.is_idle(each.id)]:
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
        self.evicted_keys = EvictedKeys(MOST_EVICTED_KEYS)
        self.damaged_keys = EvictedKeys(MOST_EVICTED_KEYS)
        if self.files is not None:
            self.files.directory.forget()
        return len(self.index) == 0

    def touch(self, entry: Entry | None) -> None:
        """Note that the prefix up to `entry` was used now. O(its blocks)."""
        self._clock += 1
        while entry is not None:
            entry.last_use = self._clock
            entry = entry.parent

    def check_integrity(self) -> None:
        """Raise AssertionError unless pools and index agree. O(blocks + slots + window blocks + entries)."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        self.panes.check_integrity()
        self.index.check_integrity()
        blocks = {entry.block for entry in self.index if entry.block}
        slots = {checkpoint.slot for checkpoint in self.index.checkpoints}
        panes = {pane.id for pane in self.index.panes}
        assert self.blocks.count or not blocks, "a model without attention has blocks in the index"
        assert not self.blocks.count or len(blocks) == len(self.index), "two entries have one block, or one has none"
        for pool, ids in ((self.blocks, blocks), (self.slots, slots), (self.panes, panes)):
            kept = {id for id in range(pool.count) if pool.is_kept(id)}
            assert kept == ids, f"the index has other {pool.name}s than the pool keeps for it"

    def _evict(self, entry: Entry) -> None:
        """Remove a leaf from the index because its block is needed."""
        if entry.checkpoint is not None:
            self.evict_checkpoint(entry.checkpoint)
        if self.files is not None and entry.block:
            self.files.save_block(entry)
        if entry.pane is not None:
            self._save_pane(entry.pane)
        self._remove(entry)
        self.evicted_keys.add(entry.key)
        self.counters.evicted_blocks += 1
        if entry.parent is not None and entry.parent.is_evictable:
            self._leaves.offer(entry.parent)

    def _save_pane(self, pane: Pane) -> None:
        """Keep a window block in files if a prefix is known to end or continue so near behind it that it is needed."""
        if self.files is not None and tier_of(pane) > 0:
            self.files.save_pane(pane.entry, pane.id)

    def _drop_pane(self, pane: Pane) -> None:
        self.index.displace_pane(pane)
        self.panes.drop(pane.id)

    def _remove(self, entry: Entry) -> None:
        if entry.pane is not None:
            self._drop_pane(entry.pane)
        self.index.remove(entry)
        if entry.block:
            self.blocks.drop(entry.block)
