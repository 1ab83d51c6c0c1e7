"""A directory of cached blocks, window blocks and states, one file each.

Files are written in the background, found by name and checked when read; a file that waits is held in separate memory.
A file is one write and one rename, so that others see it complete or not at all. Several engines may share a directory:
one may find what another wrote, and what another removed is not found.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from ostinato.errors import ConfigError, Remedy
from ostinato.files import exists, why_unwritable
from ostinato.kv_cache.offload.file_format import (
    CHECKSUM_START,
    MAGIC,
    NAME_BYTES,
    file_bytes,
    file_checksum,
    pack_head,
    read_file,
    unpack_file,
    write_file,
)
from ostinato.observe.counts import FileCounts

PAGE = mmap.PAGESIZE
MAX_SPARE_BYTES = 2**26
"""Bytes of memory that are kept for the next files."""


class PagePool:
    """Memory for files in whole pages.

    Memory of files that were written is used again, within bounds: memory that was never used costs more than what is
    copied there. One thread at a time.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[mmap.mmap]] = {}
        """Spare memory by its size in bytes."""
        self._spare_bytes = 0

    def take(self, size: int) -> mmap.mmap:
        """Return memory for a file of `size` bytes, with arbitrary contents. Raises OSError if there is no memory."""
        num_bytes = -(-size // PAGE) * PAGE
        spare = self._spare.get(num_bytes)
        if not spare:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._spare_bytes -= num_bytes
        return spare.pop()

    def release(self, pages: mmap.mmap) -> None:
        """Keep memory for later files, once it is neither read nor written any more."""
        if self._spare_bytes + len(pages) <= MAX_SPARE_BYTES:
            self._spare.setdefault(len(pages), []).append(pages)
            self._spare_bytes += len(pages)


class PendingFile:
    """A file to be written, in whole pages of memory, into which its contents are copied once."""

    def __init__(self, pages: mmap.mmap, name: bytes, token_ids: Sequence[int], size: int) -> None:
        """Begin a file in `pages`, which hold at least `size` bytes of contents after the head, whatever is in them."""
        self.pages, self.token_ids, self.size = pages, tuple(token_ids), file_bytes(len(token_ids), size)
        head = pack_head(name, token_ids)
        pages[: len(head)] = head
        pages[self.size :] = bytes(len(pages) - self.size)
        self._start = len(head)

    @property
    def contents(self) -> memoryview:
        """The bytes after the head, to be written or read. Views of them must not outlive the use of the pages."""
        return memoryview(self.pages)[self._start : self.size]

    def write_checksum(self) -> None:
        """Store the checksum of the present contents."""
        self.pages[len(MAGIC) : CHECKSUM_START] = file_checksum(memoryview(self.pages)[CHECKSUM_START : self.size])


log = logging.getLogger("ostinato.cache")

FileKind = Literal["block", "pane", "state"]
FILE_KINDS: tuple[FileKind, ...] = ("block", "pane", "state")
FileId = tuple[FileKind, bytes]
"""Kind of a file's content, and the digest of the tokens up to its end."""

PARTIAL_SUFFIX = ".unfinished"
ABOUT_FILE = "about.json"
RESCAN_WRITES = 256
"""Writes after which the directory is listed again, for changes that other engines made.

With many files there are more writes between, so that listing stays a small part of writing.
"""
RETRY_SECONDS = 60.0
"""Seconds for which nothing is written after a write failed."""


class DirectoryFullError(Exception):
    """Raised if there is no room for a file."""


class CacheDirectory:
    """The files of one model in one layout, in a separate folder. Any thread may read and write."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        most_waiting: int,
        clock: Callable[[], float] = time.monotonic,
        about: bytes = b"",
    ) -> None:
        """Make the folder, for its owner alone, and list its files.

        At most `limit` bytes are kept in it; at most `most_waiting` bytes wait in memory until they are written.
        `about` is a note for people, kept with the files. Raises ConfigError if nothing can be written there.
        """
        self.folder, self.limit = folder, limit
        self.counts = FileCounts()
        self._most_waiting, self._clock, self._about = most_waiting, clock, about
        # The mark is unique: others may write the same file, in this process or under its id in another container.
        self._mark = f"{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
        self._lock = threading.Lock()
        self._files: OrderedDict[FileId, int] = OrderedDict()
        """Sizes, the one unused for longest first."""
        self._file_bytes = 0
        self._waiting: dict[FileId, PendingFile] = {}
        self._waiting_bytes = 0
        self._pages = PagePool()
        self._jobs: SimpleQueue[FileId | None] = SimpleQueue()
        self._idle = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._paused_until = 0.0
        self._until_look = RESCAN_WRITES
        try:
            self._make_folder()
            probe = folder / self._mark
            write_file(probe, b"", 0)
            probe.unlink()
            self._rescan()
        except OSError as error:
            message = f"cache_dir {folder.parent} cannot be used: {error.strerror or error}; choose another directory"
            raise ConfigError(message, [Remedy("cache_dir", None)]) from None

    def has(self, kind: FileKind, name: bytes) -> bool:
        with self._lock:
            return (kind, name) in self._files or (kind, name) in self._waiting

    def write(
        self, kind: FileKind, name: bytes, token_ids: Sequence[int], size: int, copy: Callable[[memoryview], object]
    ) -> bool:
        """Queue `size` bytes to be written, and return whether they will be kept or are kept already.

        `copy` fills the buffer that it gets. A file that would have to wait too long in memory is dropped. The call
        returns before anything is written.
        """
        key, num_bytes = (kind, name), file_bytes(len(token_ids), size)
        if self._is_used(key):
            return True
        with self._lock:
            if key in self._waiting:
                return True
            if self._clock() < self._paused_until or self._waiting_bytes + num_bytes > self._most_waiting:
                self.counts.dropped += 1
                return False
            try:
                self._start_writer()
                draft = PendingFile(self._pages.take(num_bytes), name, token_ids, size)
                copy(draft.contents)
            except (MemoryError, OSError, RuntimeError) as error:  # no memory, or no further thread
                self._fail(error)
                return False
            self._waiting[key] = draft
            self._waiting_bytes += num_bytes
        self._jobs.put(key)
        return True

    def read(self, kind: FileKind, name: bytes, token_ids: Sequence[int], size: int) -> memoryview | None:
        """Return the `size` bytes kept under this name for these tokens; None if gone, or damaged and so removed."""
        key = kind, name
        num_bytes, contents = file_bytes(len(token_ids), size), None
        try:
            with self._lock:
                draft = self._waiting.get(key)
                if draft is not None and (draft.token_ids, draft.size) == (tuple(token_ids), num_bytes):
                    contents = memoryview(bytes(draft.contents))
            if contents is None and (packed := read_file(self._path(key), num_bytes)) is not None:
                contents = unpack_file(packed, name, token_ids)
        except (OSError, MemoryError):
            self._forget(key)
            return None
        if contents is None:
            self.counts.damaged += 1
            log.warning("a file of the prefix cache is damaged and was removed: %s", self._path(key))
            self._remove(key)
            return None
        self.counts.read += 1
        self.counts.read_bytes += size
        return contents

    def touch(self, kind: FileKind, name: bytes) -> None:
        """Note that a file, if there is one, was used now."""
        self._is_used((kind, name))

    def flush(self) -> None:
        """Wait until all waiting files are written."""
        with self._idle:
            self._idle.wait_for(lambda: not self._waiting)

    def clear(self) -> None:
        """Remove all files."""
        self.flush()
        with self._lock:
            keys = list(self._files)
        for key in keys:
            self._remove(key)

    def close(self) -> None:
        """Write the waiting files, and end the writer."""
        writer = self._writer
        if writer is not None:
            self._jobs.put(None)
            writer.join()
            self._writer = None

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._file_bytes

    @property
    def num_files(self) -> int:
        with self._lock:
            return len(self._files)

    def _is_used(self, key: FileId) -> bool:
        """Return whether the file is there, and mark it as used now, also for engines that list the directory later."""
        with self._lock:
            if key not in self._files:
                return False
            self._files.move_to_end(key)
        try:
            os.utime(self._path(key))
        except OSError:
            self._forget(key)
            return False
        return True

    def _start_writer(self) -> None:
        """Start the writer thread unless it runs. Raises RuntimeError if the process may have no further thread."""
        if self._writer is None:
            writer = threading.Thread(target=self._write_behind, name="ostinato-cache", daemon=True)
            writer.start()
            self._writer = writer

    def _fail(self, error: Exception) -> None:
        """Count and log an error of a write, and pause writing."""
        self.counts.failed += 1
        why = why_unwritable(self.folder, error) if isinstance(error, OSError) else error or repr(error)
        log.warning("the prefix cache writes no files to %s for %.0f s: %s", self.folder, RETRY_SECONDS, why)
        self._paused_until = self._clock() + RETRY_SECONDS

    def _write_behind(self) -> None:
        while (key := self._jobs.get()) is not None:
            with self._lock:
                draft = self._waiting[key]
            try:
                self._write(key, draft)
            except Exception as error:  # the thread must go on after any error: others wait for its work
                self._fail(error)
            else:
                self._add_known(key, draft.size)
                self.counts.written += 1
                self.counts.written_bytes += draft.size
            finally:
                with self._idle:
                    del self._waiting[key]
                    self._waiting_bytes -= draft.size
                    self._pages.release(draft.pages)
                    self._idle.notify_all()

    def _write(self, key: FileId, draft: PendingFile) -> None:
        """Write a file, complete or not at all. Raises OSError or DirectoryFullError if there is no room."""
        draft.write_checksum()
        self._make_room(draft.size)
        try:
            self._write_whole(self._path(key), draft.pages, draft.size)
        except FileNotFoundError:
            # The folder was cleared away (`ostinato cache clear`).
            self._make_folder()
            self._write_whole(self._path(key), draft.pages, draft.size)

    def _write_whole(self, path: Path, pages: bytes | mmap.mmap, size: int) -> None:
        unfinished = path.with_name(f"{path.name}.{self._mark}")
        try:
            write_file(unfinished, pages, size)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _make_folder(self) -> None:
        """Make the folder, with its note, if it is not there."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.folder, 0o700)
        note = self.folder / ABOUT_FILE
        if self._about and not exists(note):
            self._write_whole(note, self._about, len(self._about))

    def _make_room(self, size: int) -> None:
        """Remove the files that were unused for longest, until `size` more bytes are within the limit."""
        if size > self.limit:
            raise DirectoryFullError(f"a file of {size} bytes is more than cache_offload, {self.limit}")
        self._until_look -= 1
        if self._until_look <= 0:
            self._rescan()
        while (oldest := self._oldest_beyond(self.limit - size)) is not None:
            self._remove(oldest)
            self.counts.removed += 1

    def _oldest_beyond(self, limit: int) -> FileId | None:
        """Return the file that was unused for longest, if there are more than `limit` bytes."""
        with self._lock:
            return next(iter(self._files), None) if self._file_bytes > limit else None

    def _rescan(self) -> None:
        """List the files that the folder has now, oldest first."""
        files: list[tuple[float, FileId, int]] = []
        now = time.time()
        for file in os.scandir(self.folder):
            stem, _, kind = file.name.partition(".")
            try:
                about = file.stat()
                if file.name.endswith(PARTIAL_SUFFIX):
                    if now - about.st_mtime > RETRY_SECONDS:  # left by an engine that was killed while it wrote
                        os.unlink(file.path)
                elif kind in FILE_KINDS and len(stem) == 2 * NAME_BYTES:
                    files.append((about.st_mtime, (kind, bytes.fromhex(stem)), about.st_size))
            except (OSError, ValueError):
                continue  # another engine has just removed it, or it is not a cache file
        files.sort()
        with self._lock:
            self._files = OrderedDict((key, size) for _, key, size in files)
            self._file_bytes = sum(self._files.values())
            self._until_look = max(RESCAN_WRITES, len(files) // 8)

    def _path(self, key: FileId) -> Path:
        kind, name = key
        return self.folder / f"{name.hex()}.{kind}"

    def _add_known(self, key: FileId, size: int) -> None:
        with self._lock:
            self._file_bytes += size - self._files.pop(key, 0)
            self._files[key] = size

    def _forget(self, key: FileId) -> None:
        with self._lock:
            self._file_bytes -= self._files.pop(key, 0)

    def _remove(self, key: FileId) -> None:
        self._forget(key)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a file of the prefix cache cannot be removed: %s", error)
