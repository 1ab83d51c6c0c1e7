"""How an operating system's pages back tensors on a CPU: huge ones for what is read in every step, none for what was
read once. All of it is advice: where a system has no such thing, the tensors are the same."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

HUGE_PAGE = 2**21
"""bytes, where ordinary pages have 4 KiB"""

CACHE_LINE = 64
"""bytes; vectors that lie across two lines are read more slowly"""


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unwritten tensor. On a CPU a page of it takes memory when it is first used; large tensors begin at a huge
    page and use such pages as far as they fill them, so that none takes more memory than it is large."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or size < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE, begin, size - size % HUGE_PAGE)
    return torch.frombuffer(region, dtype=dtype, count=count, offset=begin).view(shape)


def read_ahead(file: Path) -> None:
    """Has the system begin to read `file`, without waiting for it."""
    if sys.platform == "linux":
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def drop(mapped: torch.Tensor) -> None:
    """Gives back the memory of a contiguous part of a mapped file, which would be read from the file again. Nothing
    may have been written to it."""
    if sys.platform != "linux":
        return
    begin = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - begin
    if size >= mmap.PAGESIZE:
        size -= size % mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
