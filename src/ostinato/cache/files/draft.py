"""Cache files that wait to be written, each in separate memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from ostinato.cache.files.packed import CHECKSUM_START, MAGIC, file_checksum, pack_head, file_bytes

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
    """A file that is to be written, in whole pages of memory.

    Its contents are copied to where they will be written from, and nowhere else.
    """

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
