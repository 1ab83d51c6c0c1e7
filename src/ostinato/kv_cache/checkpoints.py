"""Checkpoints of requests, and the commit of a step's results to the prefix index.

Full blocks and states are committed. A state becomes a checkpoint in its slot: the slot that was written belongs to the
index from then on, and the request writes to another one. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.prefix_index import BlockHashes, Checkpoint, IndexEntry
from ostinato.kv_cache.request_cache import RequestCache
from ostinato.kv_cache.store import CacheStore

StateCacheMode = Literal["none", "align", "all"]

SLOT_FRACTION = 4
"""Evictable slots per checkpoint that one request may add."""


@dataclass(frozen=True, slots=True)
class PrefixCachePolicy:
    """Policy on what of a request is kept for later requests. All values come from the plan."""

    prefix_caching: bool = False
    mode: StateCacheMode = "none"
    state_block_size: int = 256
    """Tokens between checkpoints inside a prompt; a multiple of the block size."""
    branches: bool = True
    """True to take a checkpoint where a prompt leaves an indexed prefix, at the end of their common blocks."""
    whole_prompts: bool = False
    """True if the tokens of a prompt see each other in both directions, so that only the same prompt has its keys."""


@dataclass(slots=True)
class CheckpointPositions:
    """The positions of one request's checkpoints, from its admission on.

    They are `last`, the last block boundary strictly before the end of its known tokens, `branch` (0: none), those at
    the request's marks, and multiples of `spacing`, at most `max_interior` of these at a time: if one more is due, the
    spacing doubles and the checkpoints that are off it are removed. While the request decodes it also has one *rolling*
    checkpoint, at the last block boundary that it has passed (`_index_rolling`).
    """

    mode: StateCacheMode
    spacing: int
    last: int
    branch: int
    max_interior: int
    interior: dict[int, Checkpoint | None] = field(default_factory=dict)
    """Checkpoints at multiples, by position; None until the step that writes it is over."""
    dropped: list[Checkpoint] = field(default_factory=list)
    """Checkpoints dropped by doubling, and not yet removed from the index."""
    marks: dict[int, Mark] = field(default_factory=dict)
    """The request's marks ahead of its hit, by the positions of their checkpoints."""
    client: str | None = None
    """The client in whose share the pins of these marks count."""
    pinned: set[int] = field(default_factory=set)
    """Positions of marks whose checkpoints are pinned."""

    def chunk_end(self, start: int, limit: int) -> int:
        """Return the end of a chunk from `start` on that could extend to `limit`: after `start`, at most `limit`."""
        if self.mode != "align":
            return limit
        for cut in (self.last, self.branch, *self.marks):
            if start < cut < limit:
                limit = cut
        multiple = limit // self.spacing * self.spacing if self.max_interior else 0
        return multiple if multiple > start else limit

    def claim_inside(self, start: int, end: int) -> list[int]:
        """Claim the multiples between `start` and `end`, both excluded, of a chunk that can write states out.

        Return all positions in between whose state it has to write out.
        """
        if self.mode != "all":
            return []
        positions = {position for position in (self.last, self.branch, *self.marks) if start < position < end}
        first = start // self.spacing * self.spacing + self.spacing
        for position in range(first, end, self.spacing):
            self.claim(position)
        positions.update(position for position in self.interior if start < position < end)
        return sorted(positions)

    def claim(self, position: int) -> bool:
        """Make room for a checkpoint at `position` if it belongs there as a multiple; return whether it does."""
        if self.mode == "none" or self.max_interior == 0 or not self.is_interior(position):
            return False
        if position in self.interior:
            return True
        while position % self.spacing == 0 and len(self.interior) >= self.max_interior:
            self.spacing *= 2
            unaligned = [end for end in self.interior if end % self.spacing]
            for removed in unaligned:
                checkpoint = self.interior.pop(removed)
                if checkpoint is not None:
                    self.dropped.append(checkpoint)
        if position % self.spacing:
            return False
        self.interior[position] = None
        return True

    def take_dropped(self) -> list[Checkpoint]:
        """Forget the multiples whose checkpoint was not taken after all. Return the checkpoints to be removed."""
        self.interior = {
            position: checkpoint for position, checkpoint in self.interior.items() if checkpoint is not None
        }
        dropped, self.dropped = self.dropped, []
        return dropped

    def is_interior(self, position: int) -> bool:
        """Return whether `position` matters only as a multiple."""
        return position not in (self.last, self.branch) and position not in self.marks


def plan_checkpoints(
    policy: PrefixCachePolicy,
    block_size: int,
    num_tokens: int,
    hit: int,
    num_matched: int,
    num_evictable: int,
    marks: Sequence[Mark] = (),
    client: str | None = None,
) -> CheckpointPositions:
    """Choose the checkpoints of a request with `num_tokens` known tokens, the first `hit` of them cached.

    The blocks of the first `num_matched` are indexed: if they extend beyond the hit, the request leaves an indexed
    prefix at a point without a checkpoint. All checkpoints share `num_evictable` slots.
    """
    last = (num_tokens - 1) // block_size * block_size
    branch = num_matched if policy.branches and num_matched > hit else 0
    ahead = {mark.boundary(block_size): mark for mark in marks if mark.boundary(block_size) > hit}
    num_apart = (last > hit) + (0 < branch < last) + len(ahead.keys() - {last, branch})
    share = max(0, num_evictable // SLOT_FRACTION - num_apart)
    apart = {cut for cut in (last, branch, *ahead) if cut > hit}
    spacing = policy.state_block_size
    while share:
        multiples = (num_tokens - 1) // spacing - hit // spacing
        if multiples - sum(cut % spacing == 0 for cut in apart) <= share:
            break
        spacing *= 2
    return CheckpointPositions(policy.mode, spacing, last, branch, share, marks=ahead, client=client)


def index_blocks_and_states(
    store: CacheStore,
    request_cache: RequestCache,
    block_hashes: BlockHashes,
    num_computed: int,
    positions: CheckpointPositions,
    reaches_end: bool,
    num_accepted: int,
) -> None:
    """Add what a step computed to the index, as `CacheManager.commit` describes."""
    entered = index_blocks(store, request_cache, block_hashes, num_computed)
    if store.window_blocks.count:
        # Other requests will continue from the prompt's end, and from where it leaves an indexed prefix.
        for position in (positions.last, positions.branch, *positions.marks):
            if position in entered:
                store.touch_window(entered[position])
    _index_reserved(store, request_cache, positions, entered)
    if request_cache.write_slots and positions.mode != "none" and not request_cache.next_step_overwrites:
        if reaches_end:
            _index_rolling(store, request_cache, positions, entered, num_computed, num_accepted)
        elif request_cache.num_indexed * block_hashes.block_size == num_computed:
            _index_chunk_end(store, request_cache, positions, num_computed)
    if positions.marks:
        _pin_marks(store, positions, entered)
    for checkpoint in positions.take_dropped():
        _drop_unless_hit(store, checkpoint)
    store.trim()


def index_blocks(
    store: CacheStore, request_cache: RequestCache, block_hashes: BlockHashes, num_computed: int
) -> dict[int, IndexEntry]:
    """Index the blocks that are full now, or exchange them for equal ones of the index. Return {end: entry} of them."""
    entered: dict[int, IndexEntry] = {}
    swapped: dict[int, int] = {}
    for index in range(request_cache.num_indexed, num_computed // block_hashes.block_size):
        block = request_cache.block_table[index] if store.blocks.count > 0 else 0
        entry = store.index.child(request_cache.last_entry, block_hashes, index)
        if entry is None:
            entry = store.add_block(request_cache.last_entry, block_hashes, index, block)
            if entry is None:
                break
        elif entry.block != block:
            store.blocks.retain((entry.block,))
            store.blocks.release((block,))
            swapped[index] = entry.block
        if index < len(request_cache.window_block_table) and request_cache.window_block_table[index]:
            _index_window_block(store, request_cache, entry, index)
        entry.num_holders += 1
        if request_cache.last_entry is not None:
            request_cache.last_entry.num_holders -= 1
        request_cache.last_entry = entered[entry.end] = entry
        request_cache.num_indexed += 1
    if swapped:
        store.counters.shared_blocks += len(swapped)
        request_cache.block_table = tuple(swapped.get(i, block) for i, block in enumerate(request_cache.block_table))
    return entered


def _index_window_block(store: CacheStore, request_cache: RequestCache, entry: IndexEntry, index: int) -> None:
    """Let the index keep the window block of an entry that has none, or exchange it for the entry's equal one."""
    window_block, table = request_cache.window_block_table[index], request_cache.window_block_table
    if entry.window_block is None:
        store.add_window_block(entry, window_block)
        return
    store.window_blocks.retain((entry.window_block.id,))
    store.window_blocks.release((window_block,))
    request_cache.window_block_table = (*table[:index], entry.window_block.id, *table[index + 1 :])


def _index_reserved(
    store: CacheStore, request_cache: RequestCache, positions: CheckpointPositions, entered: dict[int, IndexEntry]
) -> None:
    for position, slot in request_cache.reserved_checkpoints:
        entry = entered.get(position)
        if entry is not None:
            _add_checkpoint(store, positions, entry, slot, positions.is_interior(position))
    store.slots.release(tuple(slot for _, slot in request_cache.reserved_checkpoints))
    request_cache.reserved_checkpoints = ()


def _index_chunk_end(
    store: CacheStore, request_cache: RequestCache, positions: CheckpointPositions, position: int
) -> None:
    """Keep the state of a prefill chunk that ends at an indexed boundary, if a checkpoint belongs there."""
    assert request_cache.last_entry is not None, "a boundary that is indexed has an entry"
    is_interior = positions.is_interior(position)
    if is_interior and not positions.claim(position):
        return
    if _add_checkpoint(store, positions, request_cache.last_entry, request_cache.read_slot, is_interior) is not None:
        _donate_slot(store, request_cache, request_cache.read_slot)


def _index_rolling(
    store: CacheStore,
    request_cache: RequestCache,
    positions: CheckpointPositions,
    entered: dict[int, IndexEntry],
    num_computed: int,
    num_accepted: int,
) -> None:
    """Keep the state at the last indexed boundary that decoding has passed, in place of the one before it.

    If accepted drafts precede the boundary, the output may turn out to end among them (at a stop string). The
    checkpoint before it then stays until the next boundary.
    """
    written = request_cache.write_slots[: num_accepted + 1]
    for checkpoint in request_cache.replaced_checkpoints:
        _drop_unless_hit(store, checkpoint)
    request_cache.replaced_checkpoints = ()
    start = num_computed - num_accepted
    for position in range(start, num_computed + 1):
        if position not in entered:
            continue
        previous, request_cache.rolling_checkpoint = request_cache.rolling_checkpoint, None
        if previous is not None and previous.entry.checkpoint is previous:
            if positions.mode == "all" and positions.claim(previous.entry.end):
                previous.is_interior = True
                positions.interior[previous.entry.end] = previous
            elif position > start:
                request_cache.replaced_checkpoints += (previous,)
            else:
                _drop_unless_hit(store, previous)
        slot = written[position - start]
        request_cache.rolling_checkpoint = store.add_checkpoint(entered[position], slot, is_interior=False)
        if request_cache.rolling_checkpoint is not None:
            _donate_slot(store, request_cache, slot)


def _pin_marks(store: CacheStore, positions: CheckpointPositions, entered: dict[int, IndexEntry]) -> None:
    """Pin the entries at marks that this step has reached, where prompts can hit."""
    for position, mark in positions.marks.items():
        entry = entered.get(position)
        if entry is not None and store.can_hit(entry) and store.pins.pin(entry, mark.ttl, positions.client):
            positions.pinned.add(position)


def pin_hit_marks(
    store: CacheStore, path: Sequence[IndexEntry], marks: Sequence[Mark], block_size: int, client: str | None
) -> set[int]:
    """Pin the entries at marks within a hit, where shorter prompts can hit too; return their positions.

    Where no checkpoint stands, the state cannot be had any more.
    """
    pinned = set()
    for mark in marks:
        end = mark.boundary(block_size)
        if not 0 < end <= len(path) * block_size:
            continue
        entry = path[end // block_size - 1]
        if store.can_hit(entry) and store.pins.pin(entry, mark.ttl, client):
            pinned.add(end)
    return pinned


def _add_checkpoint(
    store: CacheStore, positions: CheckpointPositions, entry: IndexEntry, slot: int, is_interior: bool
) -> Checkpoint | None:
    checkpoint = store.add_checkpoint(entry, slot, is_interior)
    if checkpoint is not None and entry.end in positions.interior:
        positions.interior[entry.end] = checkpoint
    return checkpoint


def _drop_unless_hit(store: CacheStore, checkpoint: Checkpoint) -> None:
    """Remove a checkpoint that is no longer wanted, unless a request has hit it, or it is pinned or gone already."""
    if checkpoint.entry.checkpoint is checkpoint and checkpoint.hits == 0 and checkpoint.entry.pin is None:
        store.drop_checkpoint(checkpoint)


def _donate_slot(store: CacheStore, request_cache: RequestCache, slot: int) -> None:
    """Take a slot that became a checkpoint off the request's own; a request that reads it keeps its reference."""
    request_cache.write_slots = tuple(write_slot for write_slot in request_cache.write_slots if write_slot != slot)
    if slot != request_cache.read_slot:
        store.slots.release((slot,))
