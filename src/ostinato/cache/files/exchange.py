"""What goes to files at the end of an engine, and comes back from them when a request is admitted."""

from __future__ import annotations

from ostinato.cache.chain import Chain
from ostinato.cache.files.tier import FileTier
from ostinato.cache.index import Entry
from ostinato.cache.store import CacheStore, Match


def keep_in_files(store: CacheStore) -> None:
    """Writes what is in memory and can be hit, as far as files may hold it, and lets go of the files. No step may be in
    flight. O(entries)."""
    files = store.files
    if files is None:
        return
    for entry in _that_fit(_worth_keeping(store), files):
        if entry.block:
            files.save_block(entry)
        if entry.checkpoint is not None:
            files.save_state(entry, entry.checkpoint.slot)
        files.directory.flush()
    files.directory.close()
    store.files = None


def restore(store: CacheStore, chain: Chain, limit: int, match: Match, num_blocks: int, num_slots: int) -> Match:
    """What the first `limit` tokens of a text can take once files were read that go on from `match`, where that takes
    less time than computing. Only if so many blocks and slots are available, which is what the request will have taken
    then.

    Nothing is read that is not needed up to the furthest point that can be hit. Where a file turns out to be gone or
    damaged, the next best point is tried.
    """
    files = store.files
    if files is None:
        return match
    while (target := _target(store, files, chain, limit, match)) > match.hit // chain.block_size:
        # What was matched is not evicted for what goes on from it.
        matched = sum(store.blocks.is_idle(entry.block) for entry in match.matched) if store.blocks.count else 0
        if num_blocks > store.blocks.num_available - matched or num_slots > store.slots.num_available:
            break
        has_changed = _read(store, files, chain, target, match)
        match = store.match(chain, limit)
        if not has_changed:
            break
    return match


def _worth_keeping(store: CacheStore) -> list[Entry]:
    """Entries up to which a text can be hit, in the order in which their files may be removed."""
    if not store.slots.count:
        return sorted(store.index, key=_last_to_go_last)
    kept: dict[Entry, None] = {}
    for checkpoint in store.index.checkpoints:
        entry: Entry | None = checkpoint.entry
        while entry is not None and entry not in kept:
            kept[entry] = None
            entry = entry.parent
    return sorted(kept, key=_last_to_go_last)


def _that_fit(entries: list[Entry], files: FileTier) -> list[Entry]:
    """The last of them, as many as all files together may hold: what else was written would have to make room for
    these at once."""
    left, first = files.directory.limit, len(entries)
    while first and (left := left - files.bytes_of(entries[first - 1])) >= 0:
        first -= 1
    return entries[first:]


def _last_to_go_last(entry: Entry) -> tuple[int, int]:
    """Texts that were used last come last, and the beginning of each behind what goes on from it."""
    return entry.last_use, -entry.end


def _target(store: CacheStore, files: FileTier, chain: Chain, limit: int, match: Match) -> int:
    """The blocks up to the furthest point that could be hit with files, and whose reading pays; else those of the
    hit."""
    size, depth = chain.block_size, len(match.matched)
    hit, target = match.hit // size, min(limit // size, len(chain.names))
    if store.blocks.count:
        reach = depth
        while reach < target and files.has_block(chain.names[reach]):
            reach += 1
        target = reach
    if store.slots.count:
        while target > hit and not files.has_state(chain.names[target - 1]):
            target -= 1
    if target <= hit:
        return hit
    costs = store.costs
    num_bytes = max(0, target - depth) * costs.block_bytes + (costs.slot_bytes if store.slots.count else 0)
    return target if files.pays(num_bytes, costs.flops(hit * size, target * size)) else hit


def _read(store: CacheStore, files: FileTier, chain: Chain, target: int, match: Match) -> bool:
    """Enters what is missing up to block `target` from files; False if that cannot be done, though all files are as
    they should be."""
    depth = min(target, len(match.matched))
    state = None
    if store.slots.count:
        state = files.read_state(chain.names[target - 1], chain.token_ids[target - 1])
        if state is None:
            store.damaged_keys.add(chain.keys[target - 1])
            return True
    entry = match.matched[depth - 1] if depth else None
    pinned = _Pin(entry)
    try:
        for index in range(depth, target):
            entry = _read_block(store, files, chain, index, entry)
            if entry is None:
                return store.blocks.count > 0 and not files.has_block(chain.names[index])
            pinned.move(entry)
        if state is not None:
            assert entry is not None, "a target lies behind a block"
            [slot] = store.take_slots(1)
            files.memory.write_slot(slot, state)
            store.place(entry, slot, is_interior=False)
            store.slots.release((slot,))
    finally:
        pinned.move(None)
    files.use(chain.names[:target])
    return True


def _read_block(store: CacheStore, files: FileTier, chain: Chain, index: int, parent: Entry | None) -> Entry | None:
    """Enters a block from its file; None if it is gone or damaged, or another chain has its hash."""
    if not store.blocks.count:
        return store.enter(parent, chain, index, 0)
    contents = files.read_block(chain.names[index], chain.token_ids[index])
    if contents is None:
        store.damaged_keys.add(chain.keys[index])
        return None
    [block] = store.take_blocks(1)
    entry = store.enter(parent, chain, index, block)
    if entry is not None:
        files.memory.write_block(block, contents)
    store.blocks.release((block,))
    return entry


class _Pin:
    """Keeps one entry, and so all before it, from being evicted."""

    def __init__(self, entry: Entry | None) -> None:
        self._entry: Entry | None = None
        self.move(entry)

    def move(self, entry: Entry | None) -> None:
        """To another one; None: to none."""
        if entry is not None:
            entry.num_pins += 1
        if self._entry is not None:
            self._entry.num_pins -= 1
        self._entry = entry
