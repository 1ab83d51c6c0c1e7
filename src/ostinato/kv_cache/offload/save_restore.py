"""Writing the prefix index to files when an engine ends, and reading from them when a request is admitted."""

from __future__ import annotations

import logging
import math
import time

from ostinato.kv_cache.offload.file_tier import FileTier
from ostinato.kv_cache.prefix_index import BlockHashes, IndexEntry
from ostinato.kv_cache.store import CacheStore, Match

SAVE_PATIENCE = 60.0
"""Seconds for which an engine saves its prefix cache at the end of a process."""

log = logging.getLogger("ostinato.cache")


def save_to_files(store: CacheStore, patience: float = math.inf) -> None:
    """Write all that can be hit in memory to files, as far as their limit allows, and close the files.

    With `patience`, the entries used last are written first, and those left after that many seconds are lost. No step
    may be in flight. O(entries).
    """
    files, until = store.files, time.monotonic() + patience
    if files is None:
        return
    try:
        entries, windows = _entries_to_save(store, files)
        ordered = _within_limit(entries, windows, files)
        if patience < math.inf:
            ordered.reverse()
        for num_saved, entry in enumerate(ordered):
            if time.monotonic() > until:
                message = "after %g s, %d of %d entries of the prefix cache are saved, and the rest is not"
                log.warning(message, patience, num_saved, len(ordered))
                break
            if entry.block:
                files.save_block(entry)
            if entry.window_block is not None and entry in windows:
                files.save_window_block(entry, entry.window_block.id)
            if entry.checkpoint is not None:
                store.save_state(entry.checkpoint)
            files.directory.flush()
        if patience < math.inf:
            files.touch([entry.file_key for entry in ordered])  # the order in which they may be removed
    finally:
        files.directory.close()
        store.files = None


def restore_from_files(
    store: CacheStore, block_hashes: BlockHashes, limit: int, match: Match, num_blocks: int, num_slots: int
) -> Match:
    """Return the match of the first `limit` tokens after reading files that extend `match`, where that pays.

    Reading pays if it takes less time than computing. Files are read only if `num_blocks` blocks and `num_slots` slots
    are available, which the request will then have allocated, and only if its window blocks could be reserved.

    Nothing is read that is not needed up to the furthest point that can be hit. If a file turns out to be gone or
    damaged, the next best point is tried.
    """
    if store.files is None:
        return match
    while (
        target := (text := _FileRestore(store, store.files, block_hashes, match)).target(limit)
    ) > match.hit // block_hashes.block_size:
        # Matched entries are not evicted for the entries that extend them.
        matched = sum(store.blocks.is_idle(entry.block) for entry in match.matched) if store.blocks.count else 0
        if num_blocks > store.blocks.num_available - matched or num_slots > store.slots.num_available:
            break
        has_changed = text.read(target)
        match = store.match(block_hashes, limit)
        if not has_changed:
            break
    return match


def _entries_to_save(store: CacheStore, files: FileTier) -> tuple[list[IndexEntry], set[IndexEntry]]:
    """Return the entries up to which a prefix can be hit, and those whose window blocks are needed for that.

    The former are in the order in which their files may be removed.
    """
    entries: dict[IndexEntry, None] = {}
    windows: set[IndexEntry] = set()
    for end in store.index:
        if store.slots.count and end.checkpoint is None and not files.has("checkpoint", end.file_key):
            continue
        window = list(store.window_entries(end))
        if any(
            window_entry.window_block is None and not files.has("window_block", window_entry.file_key)
            for window_entry in window
        ):
            continue
        windows.update(window)
        entry: IndexEntry | None = end
        while entry is not None and entry not in entries:
            entries[entry] = None
            entry = entry.parent
    return sorted(entries, key=_removal_order), windows


def _within_limit(entries: list[IndexEntry], windows: set[IndexEntry], files: FileTier) -> list[IndexEntry]:
    """Return the last of `entries`, as many as all files together may hold.

    If others were written, they would have to make room for these at once.
    """
    left, first = files.directory.limit, len(entries)
    while first and (left := left - files.bytes_of(entries[first - 1], entries[first - 1] in windows)) >= 0:
        first -= 1
    return entries[first:]


def _removal_order(entry: IndexEntry) -> tuple[int, int]:
    """Return a sort key: prefixes used last come last, and each prefix after the entries that extend it."""
    return entry.last_use, -entry.end


class _FileRestore:
    """The cached parts of one prefix, in memory and files together."""

    def __init__(self, store: CacheStore, files: FileTier, block_hashes: BlockHashes, match: Match) -> None:
        self._store, self._files, self._block_hashes, self._match = store, files, block_hashes, match
        self._depth = len(match.matched)

    def target(self, limit: int) -> int:
        """Return the blocks up to the furthest point before `limit` that files make a hit and whose reading pays.

        If there is none, return the blocks of the present hit.
        """
        store, files, block_hashes = self._store, self._files, self._block_hashes
        size = block_hashes.block_size
        hit, target = self._match.hit // size, min(limit // size, len(block_hashes.file_keys))
        if store.blocks.count:
            reach = self._depth
            while reach < target and files.has("block", block_hashes.file_keys[reach]):
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
        sizes = files.memory.sizes
        num_bytes = max(0, target - self._depth) * sizes["block"]
        num_bytes += sizes["checkpoint"] if self._lacks_state(target - 1) else 0
        num_bytes += sizes["window_block"] * sum(map(self._lacks_window_block, self._window(target)))
        return target if files.is_worth_reading(num_bytes, store.costs.flops(hit * size, target * size)) else hit

    def read(self, target: int) -> bool:
        """Commit the missing parts up to block `target` from files; return False if that cannot be done.

        False means that it failed although all files are as they should be.
        """
        store, files, block_hashes = self._store, self._files, self._block_hashes
        depth = min(target, self._depth)
        state = None
        if self._lacks_state(target - 1):
            state = files.read("checkpoint", block_hashes.file_keys[target - 1], block_hashes.token_ids[target - 1])
            if state is None:
                store.damaged_keys.add(block_hashes.keys[target - 1])
                return True
        path = list(self._match.matched[:depth])
        held = _HeldEntry(path[-1] if path else None)
        # They are referenced before anything is allocated, so that they are not evicted for the others.
        window_blocks = [
            held.window_block.id for held in path[self._window(target).start :] if held.window_block is not None
        ]
        store.window_blocks.retain(window_blocks)
        try:
            for index in range(depth, target):
                entry = self._read_block(index, path[-1] if path else None)
                if entry is None:
                    return store.blocks.count > 0 and not files.has("block", block_hashes.file_keys[index])
                path.append(entry)
                held.move(entry)
            for index in self._window(target):
                if path[index].window_block is None:
                    if (window_block := self._read_window_block(index, path[index])) is None:
                        store.damaged_keys.add(block_hashes.keys[target - 1])
                        return True
                    window_blocks.append(window_block)
            if state is not None:
                [slot] = store.allocate_slots(1)
                files.memory.write("checkpoint", slot, state)
                store.add_checkpoint(path[-1], slot, is_interior=False)
                store.slots.release((slot,))
            store.touch_window(path[-1])
        finally:
            held.move(None)
            store.release_window_blocks(window_blocks)
        files.touch(block_hashes.file_keys[:target])
        return True

    def _window(self, target: int) -> range:
        """Return the blocks whose window blocks are needed to continue after block `target`."""
        return range(max(0, target - self._store.blocks_per_window), target)

    def _in_memory(self, index: int) -> IndexEntry | None:
        return self._match.matched[index] if index < self._depth else None

    def _lacks_state(self, index: int) -> bool:
        """Return whether the state after a block is needed and not in memory."""
        entry = self._in_memory(index)
        return self._store.slots.count > 0 and (entry is None or entry.checkpoint is None)

    def _has_state(self, index: int) -> bool:
        return not self._lacks_state(index) or self._files.has("checkpoint", self._block_hashes.file_keys[index])

    def _lacks_window_block(self, index: int) -> bool:
        entry = self._in_memory(index)
        return entry is None or entry.window_block is None

    def _last_lacking(self, target: int) -> int | None:
        """Return the last block whose window block is needed to continue after `target` and is nowhere."""
        names = self._block_hashes.file_keys
        gone = (
            i
            for i in reversed(self._window(target))
            if self._lacks_window_block(i) and not self._files.has("window_block", names[i])
        )
        return next(gone, None)

    def _read_block(self, index: int, parent: IndexEntry | None) -> IndexEntry | None:
        """Commit a block from its file; return None if it is gone or damaged, or other tokens have its hash."""
        store, files, block_hashes = self._store, self._files, self._block_hashes
        if not store.blocks.count:
            return store.add_block(parent, block_hashes, index, 0)
        contents = files.read("block", block_hashes.file_keys[index], block_hashes.token_ids[index])
        if contents is None:
            store.damaged_keys.add(block_hashes.keys[index])
            return None
        [block] = store.allocate_blocks(1)
        entry = store.add_block(parent, block_hashes, index, block)
        if entry is not None:
            files.memory.write("block", block, contents)
        store.blocks.release((block,))
        return entry

    def _read_window_block(self, index: int, entry: IndexEntry) -> int | None:
        """Commit a window block from its file, and reference it; return None if it is gone or damaged."""
        store, files, block_hashes = self._store, self._files, self._block_hashes
        contents = files.read("window_block", block_hashes.file_keys[index], block_hashes.token_ids[index])
        if contents is None:
            return None
        [window_block] = store.allocate_window_blocks(1)
        files.memory.write("window_block", window_block, contents)
        store.add_window_block(entry, window_block)
        return window_block


class _HeldEntry:
    """Holder of one entry, which keeps it, and so all before it, from being evicted."""

    def __init__(self, entry: IndexEntry | None) -> None:
        self._entry: IndexEntry | None = None
        self.move(entry)

    def move(self, entry: IndexEntry | None) -> None:
        """Hold another entry instead, or none."""
        if entry is not None:
            entry.num_holders += 1
        if self._entry is not None:
            self._entry.num_holders -= 1
        self._entry = entry
