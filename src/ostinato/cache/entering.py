"""Committing a step's results to the prefix index: full blocks, and states as checkpoints.

A state becomes a checkpoint in its slot: the slot that was written belongs to the index from then on, and the request
writes to another one. Nothing is copied.
"""

from __future__ import annotations

from ostinato.cache.chain import Chain
from ostinato.cache.holding import Holding
from ostinato.cache.index import Checkpoint, Entry
from ostinato.cache.placement import Placement
from ostinato.cache.store import CacheStore


def enter(
    store: CacheStore,
    holding: Holding,
    chain: Chain,
    num_computed: int,
    placement: Placement,
    samples: bool,
    anchor: int,
) -> None:
    """Commit what a step computed to the index, as `CacheManager.enter` describes."""
    entered = enter_blocks(store, holding, chain, num_computed)
    if store.panes.count:
        # Other requests will continue from the prompt's end, and from where it leaves an indexed prefix.
        for position in (placement.last, placement.branch):
            if position in entered:
                store.use_window(entered[position])
    _place_reserved(store, holding, placement, entered)
    if holding.slots and placement.mode != "none" and not holding.is_overwritten:
        if samples:
            _place_trailing(store, holding, placement, entered, num_computed, anchor)
        elif holding.num_indexed * chain.block_size == num_computed:
            _place_last_written(store, holding, placement, num_computed)
    for checkpoint in placement.settle():
        _give_up(store, checkpoint)
    store.trim()


def enter_blocks(store: CacheStore, holding: Holding, chain: Chain, num_computed: int) -> dict[int, Entry]:
    """Index the blocks that are full now, or exchange them for equal ones of the index. Return {end: entry} of them."""
    entered: dict[int, Entry] = {}
    swapped: dict[int, int] = {}
    for index in range(holding.num_indexed, num_computed // chain.block_size):
        own = holding.block_table[index] if store.blocks.count > 0 else 0
        entry = store.index.child(holding.tip, chain, index)
        if entry is None:
            entry = store.enter(holding.tip, chain, index, own)
            if entry is None:
                break
        elif entry.block != own:
            store.blocks.retain((entry.block,))
            store.blocks.release((own,))
            swapped[index] = entry.block
        if index < len(holding.pane_table) and holding.pane_table[index]:
            _enter_pane(store, holding, entry, index)
        entry.num_pins += 1
        if holding.tip is not None:
            holding.tip.num_pins -= 1
        holding.tip = entered[entry.end] = entry
        holding.num_indexed += 1
    if swapped:
        store.counters.shared_blocks += len(swapped)
        holding.block_table = tuple(swapped.get(i, block) for i, block in enumerate(holding.block_table))
    return entered


def _enter_pane(store: CacheStore, holding: Holding, entry: Entry, index: int) -> None:
    """Let the index keep the window block of an entry that has none, or exchange it for the entry's equal one."""
    own, table = holding.pane_table[index], holding.pane_table
    if entry.pane is None:
        store.keep_pane(entry, own)
        return
    store.panes.retain((entry.pane.id,))
    store.panes.release((own,))
    holding.pane_table = (*table[:index], entry.pane.id, *table[index + 1 :])


def _place_reserved(store: CacheStore, holding: Holding, placement: Placement, entered: dict[int, Entry]) -> None:
    for position, slot in holding.reserved:
        entry = entered.get(position)
        if entry is not None:
            _place(store, placement, entry, slot, placement.is_interior(position))
    store.slots.release(tuple(slot for _, slot in holding.reserved))
    holding.reserved = ()


def _place_last_written(store: CacheStore, holding: Holding, placement: Placement, position: int) -> None:
    """Keep the state of a prefill chunk that ends at an indexed boundary, if a checkpoint belongs there."""
    assert holding.tip is not None, "a boundary that is indexed has an entry"
    is_interior = placement.is_interior(position)
    if is_interior and not placement.claims(position):
        return
    if _place(store, placement, holding.tip, holding.read_slot, is_interior) is not None:
        _leave_behind(store, holding, holding.read_slot)


def _place_trailing(
    store: CacheStore,
    holding: Holding,
    placement: Placement,
    entered: dict[int, Entry],
    num_computed: int,
    anchor: int,
) -> None:
    """Keep the state at the last indexed boundary that decoding has passed, in place of the one before it.

    If accepted drafts precede the boundary, the output may turn out to end among them (at a stop string). The
    checkpoint before it then stays until the next boundary.
    """
    written = holding.slots[: anchor + 1]
    for checkpoint in holding.superseded:
        _give_up(store, checkpoint)
    holding.superseded = ()
    start = num_computed - anchor
    for position in range(start, num_computed + 1):
        if position not in entered:
            continue
        before, holding.trailing = holding.trailing, None
        if before is not None and before.entry.checkpoint is before:
            if placement.mode == "all" and placement.claims(before.entry.end):
                before.is_interior = True
                placement.placed[before.entry.end] = before
            elif position > start:
                holding.superseded += (before,)
            else:
                _give_up(store, before)
        slot = written[position - start]
        holding.trailing = store.place(entered[position], slot, is_interior=False)
        if holding.trailing is not None:
            _leave_behind(store, holding, slot)


def _place(store: CacheStore, placement: Placement, entry: Entry, slot: int, is_interior: bool) -> Checkpoint | None:
    checkpoint = store.place(entry, slot, is_interior)
    if checkpoint is not None and entry.end in placement.placed:
        placement.placed[entry.end] = checkpoint
    return checkpoint


def _give_up(store: CacheStore, checkpoint: Checkpoint) -> None:
    """Remove a checkpoint that is no longer wanted, unless a request has hit it or it is gone already."""
    if checkpoint.entry.checkpoint is checkpoint and checkpoint.hits == 0:
        store.give_up(checkpoint)


def _leave_behind(store: CacheStore, holding: Holding, slot: int) -> None:
    """Take a slot that became a checkpoint off the slots that the request writes to.

    The request keeps its reference if it reads the slot once more.
    """
    holding.slots = tuple(own for own in holding.slots if own != slot)
    if slot != holding.read_slot:
        store.slots.release((slot,))
