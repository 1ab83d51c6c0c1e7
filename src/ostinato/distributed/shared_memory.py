"""Sums and gathers of ranks on one machine's processors, through memory that all of them have mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator

import torch

from ostinato.distributed import rank_messages
from ostinato.plan.tensor_parallel import Rank

CHUNK_BYTES = 2**20
"""Bytes that a rank gives the others at a time; longer tensors go in pieces. A multiple of any element's size."""
SPIN_SECONDS = 2e-4
"""Seconds that a rank spins before it sleeps. All ranks compute the same at the same time."""
_GLANCE = 0.1
"""Seconds between looks whether all ranks are alive, and whether the wait was interrupted, for example by Ctrl-C."""
_SEMAPHORE = 64
"""Bytes between two semaphores: each has a cache line. One takes 32."""
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)
_short = ctypes.PyDLL(None)
"""C library for calls that do not wait. They keep the GIL, which is slow to get back from a busy thread."""


def has_shared_memory() -> bool:
    """Return whether shared memory without a name, and semaphores on a monotonic clock, exist (Linux with glibc)."""
    return hasattr(os, "memfd_create") and hasattr(_libc, "sem_clockwait")


def create_shared_memory(ranks: int) -> int:
    """Return the memory of `ranks` ranks: a file descriptor, for each to inherit."""
    fileno = os.memfd_create("ostinato-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fileno, _head(ranks) + 2 * ranks * CHUNK_BYTES)
    with mmap.mmap(fileno, 0) as memory:
        for number in range(ranks * ranks):
            semaphore = (ctypes.c_char * _SEMAPHORE).from_buffer(memory, number * _SEMAPHORE)
            _short.sem_init(ctypes.byref(semaphore), 1, 0)
            del semaphore  # the memory cannot be closed while something points into it
    return fileno


def _head(ranks: int) -> int:
    """Return the bytes of the semaphores, in whole pages."""
    return -(-ranks * ranks * _SEMAPHORE // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryGroup:
    """Connection of one rank with the others (`ops.reference.collectives.Collectives`).

    In an exchange, a rank writes its data into its area, posts to each of the others a semaphore of the pair, and waits
    for theirs. It alternates between two areas: before it writes into one again, all others have posted for the
    exchange between, and so have read it. Sums are taken over the ranks in their order, in float32, so a sum's bits
    depend only on its terms.
    """

    def __init__(self, rank: Rank, fileno: int) -> None:
        """Map the memory of `create_shared_memory`, given by its descriptor `fileno`."""
        self.rank, self.number = rank, rank.number
        self.check: Callable[[], None] = lambda: None
        """Callback during a wait, called now and then; it raises if the wait is in vain."""
        memory = mmap.mmap(fileno, 0)
        self._semaphores = [
            [
                (ctypes.c_char * _SEMAPHORE).from_buffer(memory, (by * rank.of + of) * _SEMAPHORE)
                for of in range(rank.of)
            ]
            for by in range(rank.of)
        ]
        areas = torch.frombuffer(memory, dtype=torch.uint8, offset=_head(rank.of)).view(2, rank.of, CHUNK_BYTES)
        self._areas: dict[torch.dtype, torch.Tensor] = {torch.uint8: areas}
        self._turn = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks in place, and return it. Errors as `_wait`."""
        flat = x.contiguous().view(-1)
        for piece in self._pieces(flat):
            first, second, *others = self._exchange(piece)
            if piece.dtype == torch.float32:
                torch.add(first, second, out=piece)
                for each in others:
                    piece += each
                continue
            total = first.float() + second
            for each in others:
                total += each
            piece.copy_(total)
        return x if x.is_contiguous() else x.copy_(flat.view(x.shape))

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the `x` of each rank, in their order. Errors as `_wait`."""
        return self._gathered(x, is_wanted=True)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the `x` of each rank on the first rank, None on the others."""
        return self._gathered(x, is_wanted=self.rank.leads) or None

    def _gathered(self, x: torch.Tensor, *, is_wanted: bool) -> list[torch.Tensor]:
        found = [torch.empty(x.shape, dtype=x.dtype) for _ in range(self.rank.of if is_wanted else 0)]
        begin = 0
        for piece in self._pieces(x.contiguous().view(-1)):
            parts, end = self._exchange(piece), begin + len(piece)
            for whole, part in zip(found, parts, strict=False):
                whole.view(-1)[begin:end] = part
            begin = end
        return found

    def _pieces(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from flat.split(CHUNK_BYTES // flat.element_size())

    def _exchange(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Exchange a piece, and return those of all ranks. They are valid until the exchange after the next one."""
        areas = self._areas.get(piece.dtype)
        if areas is None:
            areas = self._areas[piece.dtype] = self._areas[torch.uint8].view(piece.dtype)
        own, size = self.number, len(piece)
        parts = [areas[self._turn, number, :size] for number in range(self.rank.of)]
        parts[own].copy_(piece)
        self._turn = 1 - self._turn
        for number in range(self.rank.of):
            if number != own:
                _short.sem_post(self._semaphores[own][number])
        for number in range(self.rank.of):
            if number != own:
                self._wait(self._semaphores[number][own])
        return parts

    def _wait(self, semaphore: ctypes.Array[ctypes.c_char]) -> None:
        """Wait until another rank has come.

        RankError on the first rank if another one lives and does not come; also raises the errors of `check`.
        """
        begin = time.monotonic()
        while _short.sem_trywait(semaphore):
            if time.monotonic() - begin < SPIN_SECONDS:
                os.sched_yield()
                continue
            until = time.monotonic() + _GLANCE
            at = _Timespec(int(until), int(until % 1 * 1e9))
            if not _libc.sem_clockwait(semaphore, _CLOCK_MONOTONIC, ctypes.byref(at)):
                return
            self.check()
            if self.rank.leads and time.monotonic() - begin > rank_messages.RANK_TIMEOUT:
                raise rank_messages.rank_timeout_error(self.rank.of)
