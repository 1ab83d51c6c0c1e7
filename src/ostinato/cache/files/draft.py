"""Files of the cache that wait to be written, each in memory of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from ostinato.cache.files.packed import CHECKED_FROM, MAGIC, checksum_of, head_of, packed_bytes

PAGE = mmap.PAGESIZE
MOST_SPARE = 2**26
"""Bytes of memory that are kept for the next files."""


class Pages:
    """Memory for files in whole pages. That of files which were written is used again, within bounds: memory that was
    never used costs more than what is copied there. One thread at a time."""

    def __init__(self) -> None:
        self._spare: dict[int, list[mmap.mmap]] = {}
        """By its bytes."""
        self._spare_bytes = 0

    def take(self, size: int) -> mmap.mmap:
        """For a file of `size` bytes, with anything in it. OSError if there is no memory."""
        num_bytes = -(-size // PAGE) * PAGE
        spare = self._spare.get(num_bytes)
        if not spare:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._spare_bytes -= num_bytes
        return spare.pop()

    def give_back(self, pages: mmap.mmap) -> None:
        """Nobody reads or writes them any more."""
        if self._spare_bytes + len(pages) <= MOST_SPARE:
            self._spare.setdefault(len(pages), []).append(pages)
            self._spare_bytes += len(pages)


class Draft:
    """A file that is to be written, in whole pages of memory. Its contents are copied to where they will be written
    from, and nowhere else."""

    def __init__(self, pages: mmap.mmap, name: bytes, token_ids: Sequence[int], size: int) -> None:
        """`pages`: of so many bytes of contents, whatever they hold."""
        self.pages, self.token_ids, self.size = pages, tuple(token_ids), packed_bytes(len(token_ids), size)
        head = head_of(name, token_ids)
        pages[: len(head)] = head
        pages[self.size :] = bytes(len(pages) - self.size)
        self._start = len(head)

    @property
    def contents(self) -> memoryview:
        """What follows the head, to be written or to be read. Nobody may keep it for longer than the pages are its."""
        return memoryview(self.pages)[self._start : self.size]

    def seal(self) -> None:
        """Notes the checksum of what it holds now."""
        self.pages[len(MAGIC) : CHECKED_FROM] = checksum_of(memoryview(self.pages)[CHECKED_FROM : self.size])
