"""Operating system pages of arrays on a CPU: huge ones for data read in every step, none for data read once.

All of it is advice: on a system without such pages, the arrays are the same.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

HUGE_PAGE = 2**21
"""Bytes of a huge page; ordinary pages have 4 KiB."""

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python does not name; an older system ignores it."""

CACHE_LINE = 64
"""Bytes of a cache line; vectors across two lines are read more slowly."""


def empty(shape: Sequence[int], dtype: np.dtype, *, fills_slowly: bool = False) -> np.ndarray:
    """Return an unwritten array that begins at a cache line.

    A page of it takes memory when it is first used. Large arrays begin at a huge page and use huge pages as far as they
    fill them, so that no array takes more memory than its size. An array that `fills_slowly`, from its beginning, has
    ordinary pages there: the first byte written to a huge page takes all its memory, and the time to clear it.
    """
    size = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or size < HUGE_PAGE:
        memory = np.empty(size + CACHE_LINE, np.uint8)
        begin = -memory.ctypes.data % CACHE_LINE
        return memory[begin : begin + size].view(dtype).reshape(shape)
    region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(region, np.uint8)
    begin = -memory.ctypes.data % HUGE_PAGE
    with suppress(OSError):  # The system may have no huge pages.
        ordinary = HUGE_PAGE if fills_slowly else 0
        if size - ordinary >= HUGE_PAGE:
            region.madvise(mmap.MADV_HUGEPAGE, begin + ordinary, size - size % HUGE_PAGE - ordinary)
    return memory[begin : begin + size].view(dtype).reshape(shape)


def read_ahead(file: Path) -> None:
    """Have the system begin to read `file`, without waiting for it."""
    if sys.platform == "linux":
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def populate_pages(mapped: np.ndarray) -> None:
    """Have the system map a contiguous part of a mapped file into this process's pages at once.

    That takes a small part of the time that it takes page by page.
    """
    if sys.platform == "linux":
        begin = mapped.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        size = mapped.ctypes.data + mapped.nbytes - begin
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_READ))


def drop(mapped: np.ndarray) -> None:
    """Free a contiguous, never written part of a mapped file's memory; an access reads it from the file again."""
    if sys.platform != "linux":
        return
    begin = -(-mapped.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = mapped.ctypes.data + mapped.nbytes - begin
    if size >= mmap.PAGESIZE:
        size -= size % mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
