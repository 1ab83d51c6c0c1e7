"""Tensors that end where the process may read no further."""

from __future__ import annotations

import ctypes
import mmap

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NOTHING = 0
"""PROT_NONE: the module mmap has no word for it."""


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pages of its own, whose last byte ends before one that nobody may read: who does ends with a signal."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if _LIBC.mprotect(whole.data_ptr() + pages * mmap.PAGESIZE, mmap.PAGESIZE, _NOTHING) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
    end = pages * mmap.PAGESIZE
    copy = whole[end - size : end].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy
