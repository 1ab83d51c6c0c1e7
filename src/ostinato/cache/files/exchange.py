"""Writing the prefix index to files when an engine ends, and reading from them when a request is admitted."""

from __future__ import annotations

from ostinato.cache.chain import Chain
from ostinato.cache.files.tier import FileTier
from ostinato.cache.index import Entry
from ostinato.cache.store import CacheStore, Match


def keep_in_files(store: CacheStore) -> None:
    """Write all that can be hit in memory to files, as far as their limit allows, and close the files.

    No step may be in flight. O(entries).
    """
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
    """Return the match of the first `limit` tokens after reading files that extend `match`, where that pays.

    Reading pays if it takes less time than computing. Files are read only if `num_blocks` blocks and `num_slots` slots
    are available, which the request will then have allocated, and only if its window blocks could be promised to it.

    Nothing is read that is not needed up to the furthest point that can be hit. If a file turns out to be gone or
    damaged, the next best point is tried.
    """
    if store.files is None:
        return match
    while (target := (text := _Text(store, store.files, chain, match)).target(limit)) > match.hit // chain.block_size:
        # Matched entries are not evicted for the entries that extend them.
        matched = sum(store.blocks.is_idle(entry.block) for entry in match.matched) if store.blocks.count else 0
        if num_blocks > store.blocks.num_available - matched or num_slots > store.slots.num_available:
            break
        has_changed = text.read(target)
        match = store.match(chain, limit)
        if not has_changed:
            break
    return match


def _worth_keeping(store: CacheStore, files: FileTier) -> tuple[list[Entry], set[Entry]]:
    """Return the entries up to which a prefix can be hit, and those whose window blocks are needed for that.

    The former are in the order in which their files may be removed.
    """
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
    """Return the last of `entries`, as many as all files together may hold.

    If others were written, they would have to make room for these at once.
    """
    left, first = files.directory.limit, len(entries)
    while first and (left := left - files.bytes_of(entries[first - 1], entries[first - 1] in windows)) >= 0:
        first -= 1
    return entries[first:]


def _last_to_go_last(entry: Entry) -> tuple[int, int]:
    """Return a sort key: prefixes used last come last, and each prefix after the entries that extend it."""
    return entry.last_use, -entry.end


class _Text:
    """The cached parts of one prefix, in memory and files together."""

    def __init__(self, store: CacheStore, files: FileTier, chain: Chain, match: Match) -> None:
        self._store, self._files, self._chain, self._match = store, files, chain, match
        self._depth = len(match.matched)

    def target(self, limit: int) -> int:
        """Return the blocks up to the furthest point before `limit` that files make a hit and whose reading pays.

        If there is none, return the blocks of the present hit.
        """
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
            # Later ends within a window of it lack the same window block.
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
        """Commit the missing parts up to block `target` from files; return False if that cannot be done.

        False means that it failed although all files are as they should be.
        """
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
        # They are referenced before anything is allocated, so that they are not evicted for the others.
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
        """Return the blocks whose window blocks are needed to continue after block `target`."""
        return range(max(0, target - self._store.of_window), target)

    def _in_memory(self, index: int) -> Entry | None:
        return self._match.matched[index] if index < self._depth else None

    def _lacks_state(self, index: int) -> bool:
        """Return whether the state after a block is needed and not in memory."""
        entry = self._in_memory(index)
        return self._store.slots.count > 0 and (entry is None or entry.checkpoint is None)

    def _has_state(self, index: int) -> bool:
        return not self._lacks_state(index) or self._files.has_state(self._chain.names[index])

    def _lacks_pane(self, index: int) -> bool:
        entry = self._in_memory(index)
        return entry is None or entry.pane is None

    def _last_lacking(self, target: int) -> int | None:
        """Return the last block whose window block is needed to continue after `target` and is nowhere."""
        names = self._chain.names
        gone = (i for i in reversed(self._window(target)) if self._lacks_pane(i) and not self._files.has_pane(names[i]))
        return next(gone, None)

    def _read_block(self, index: int, parent: Entry | None) -> Entry | None:
        """Commit a block from its file; return None if it is gone or damaged, or other tokens have its hash."""
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
        """Commit a window block from its file, and reference it; return None if it is gone or damaged."""
        store, files, chain = self._store, self._files, self._chain
        contents = files.read_pane(chain.names[index], chain.token_ids[index])
        if contents is None:
            return None
        [pane] = store.take_panes(1)
        files.memory.write_pane(pane, contents)
        store.keep_pane(entry, pane)
        return pane


class _Pin:
    """Pin that keeps one entry, and so all before it, from being evicted."""

    def __init__(self, entry: Entry | None) -> None:
        self._entry: Entry | None = None
        self.move(entry)

    def move(self, entry: Entry | None) -> None:
        """Pin another entry instead, or none."""
        if entry is not None:
            entry.num_pins += 1
        if self._entry is not None:
            self._entry.num_pins -= 1
        self._entry = entry
