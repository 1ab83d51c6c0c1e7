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
    try:
        kept, windows = _worth_keeping(store, files)
        for entry in _that_fit(kept, windows, files):
            if entry.block:
                files.save_block(entry)
            if entry.pane is not None and entry in windows:
                files.save_pane(entry, entry.pane.id)
            if entry.checkpoint is not None:
                files.save_state(entry, entry.checkpoint.slot)
            files.directory.flush()
    finally:
        files.directory.close()
        store.files = None


def restore(store: CacheStore, chain: Chain, limit: int, match: Match, num_blocks: int, num_slots: int) -> Match:
    """What the first `limit` tokens of a text can take once files were read that go on from `match`, where that takes
    less time than computing. Only if so many blocks and slots are available, which is what the request will have taken
    then; its panes could be promised to it.

    Nothing is read that is not needed up to the furthest point that can be hit. Where a file turns out to be gone or
    damaged, the next best point is tried.
    """
    if store.files is None:
        return match
    while (target := (text := _Text(store, store.files, chain, match)).target(limit)) > match.hit // chain.block_size:
        # What was matched is not evicted for what goes on from it.
        matched = sum(store.blocks.is_idle(entry.block) for entry in match.matched) if store.blocks.count else 0
        if num_blocks > store.blocks.num_available - matched or num_slots > store.slots.num_available:
            break
        has_changed = text.read(target)
        match = store.match(chain, limit)
        if not has_changed:
            break
    return match


def _worth_keeping(store: CacheStore, files: FileTier) -> tuple[list[Entry], set[Entry]]:
    """Entries up to which a text can be hit, in the order in which their files may be removed; and those whose panes
    are needed for that."""
    kept: dict[Entry, None] = {}
    windows: set[Entry] = set()
    for end in store.index:
        if store.slots.count and end.checkpoint is None and not files.has_state(end.name):
            continue
        window = list(store.window_of(end))
        if any(each.pane is None and not files.has_pane(each.name) for each in window):
            continue
        windows.update(window)
        entry: Entry | None = end
        while entry is not None and entry not in kept:
            kept[entry] = None
            entry = entry.parent
    return sorted(kept, key=_last_to_go_last), windows


def _that_fit(entries: list[Entry], windows: set[Entry], files: FileTier) -> list[Entry]:
    """The last of them, as many as all files together may hold: what else was written would have to make room for
    these at once."""
    left, first = files.directory.limit, len(entries)
    while first and (left := left - files.bytes_of(entries[first - 1], entries[first - 1] in windows)) >= 0:
        first -= 1
    return entries[first:]


def _last_to_go_last(entry: Entry) -> tuple[int, int]:
    """Texts that were used last come last, and the beginning of each behind what goes on from it."""
    return entry.last_use, -entry.end


class _Text:
    """What memory and files together have of one text."""

    def __init__(self, store: CacheStore, files: FileTier, chain: Chain, match: Match) -> None:
        self._store, self._files, self._chain, self._match = store, files, chain, match
        self._depth = len(match.matched)

    def target(self, limit: int) -> int:
        """The blocks up to the furthest point before `limit` that could be hit with files, and whose reading pays; else
        those of the hit."""
        store, files, chain = self._store, self._files, self._chain
        size = chain.block_size
        hit, target = self._match.hit // size, min(limit // size, len(chain.names))
        if store.blocks.count:
            reach = self._depth
            while reach < target and files.has_block(chain.names[reach]):
                reach += 1
            target = reach
        while target > hit and not self._has_state(target - 1):
            target -= 1
        while target > hit and (lacking := self._last_lacking(target)) is not None:
            # What ends further on, within a window of it, lacks the same pane.
            target = lacking
            while target > hit and not self._has_state(target - 1):
                target -= 1
        if target <= hit:
            return hit
        memory = files.memory
        num_bytes = max(0, target - self._depth) * memory.block_bytes
        num_bytes += memory.slot_bytes if self._lacks_state(target - 1) else 0
        num_bytes += memory.pane_bytes * sum(map(self._lacks_pane, self._window(target)))
        return target if files.pays(num_bytes, store.costs.flops(hit * size, target * size)) else hit

    def read(self, target: int) -> bool:
        """Enters what is missing up to block `target` from files; False if that cannot be done, though all files are as
        they should be."""
        store, files, chain = self._store, self._files, self._chain
        depth = min(target, self._depth)
        state = None
        if self._lacks_state(target - 1):
            state = files.read_state(chain.names[target - 1], chain.token_ids[target - 1])
            if state is None:
                store.damaged_keys.add(chain.keys[target - 1])
                return True
        path = list(self._match.matched[:depth])
        pinned = _Pin(path[-1] if path else None)
        # Referenced before anything is taken, so that they are not evicted for the others.
        panes = [each.pane.id for each in path[self._window(target).start :] if each.pane is not None]
        store.panes.retain(panes)
        try:
            for index in range(depth, target):
                entry = self._read_block(index, path[-1] if path else None)
                if entry is None:
                    return store.blocks.count > 0 and not files.has_block(chain.names[index])
                path.append(entry)
                pinned.move(entry)
            for index in self._window(target):
                if path[index].pane is None:
                    if (pane := self._read_pane(index, path[index])) is None:
                        store.damaged_keys.add(chain.keys[target - 1])
                        return True
                    panes.append(pane)
            if state is not None:
                [slot] = store.take_slots(1)
                files.memory.write_slot(slot, state)
                store.place(path[-1], slot, is_interior=False)
                store.slots.release((slot,))
            store.use_window(path[-1])
        finally:
            pinned.move(None)
            store.release_panes(panes)
        files.use(chain.names[:target])
        return True

    def _window(self, target: int) -> range:
        """The blocks whose panes a text needs that goes on behind block `target`."""
        return range(max(0, target - self._store.of_window), target)

    def _in_memory(self, index: int) -> Entry | None:
        return self._match.matched[index] if index < self._depth else None

    def _lacks_state(self, index: int) -> bool:
        """Whether the state behind a block is needed and not in memory."""
        entry = self._in_memory(index)
        return self._store.slots.count > 0 and (entry is None or entry.checkpoint is None)

    def _has_state(self, index: int) -> bool:
        return not self._lacks_state(index) or self._files.has_state(self._chain.names[index])

    def _lacks_pane(self, index: int) -> bool:
        entry = self._in_memory(index)
        return entry is None or entry.pane is None

    def _last_lacking(self, target: int) -> int | None:
        """The last block whose pane is needed to go on behind `target` and is nowhere."""
        names = self._chain.names
        gone = (i for i in reversed(self._window(target)) if self._lacks_pane(i) and not self._files.has_pane(names[i]))
        return next(gone, None)

    def _read_block(self, index: int, parent: Entry | None) -> Entry | None:
        """Enters a block from its file; None if it is gone or damaged, or another chain has its hash."""
        store, files, chain = self._store, self._files, self._chain
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

    def _read_pane(self, index: int, entry: Entry) -> int | None:
        """Enters a pane from its file, and holds it; None if it is gone or damaged."""
        store, files, chain = self._store, self._files, self._chain
        contents = files.read_pane(chain.names[index], chain.token_ids[index])
        if contents is None:
            return None
        [pane] = store.take_panes(1)
        files.memory.write_pane(pane, contents)
        store.keep_pane(entry, pane)
        return pane


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
