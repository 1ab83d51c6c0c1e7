"""What ranks on one machine's processors add up and gather, through memory that all of them have mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator

import torch

from ostinato.engine.ranks import waiting
from ostinato.plan.cuts import Rank

AREA = 2**20
"""Bytes that a rank gives the others at a time; what is longer goes in pieces. A multiple of any element's size."""
SPIN = 2e-4
"""Seconds that a rank looks for another again and again before it sleeps. All compute the same at a time."""
_GLANCE = 0.1
"""Between looks whether all ranks live, and whether something interrupts the waiting, such as Ctrl-C."""
_SEMAPHORE = 64
"""Bytes between two semaphores: each has a cache line. One takes 32."""
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)
_short = ctypes.PyDLL(None)
"""For calls that do not wait: they keep the interpreter's lock, which a busy thread gives back only after a while."""


def is_available() -> bool:
    """Whether processes of this system can share memory without a name, and semaphores in it that wait by a clock that
    nobody sets: Linux with glibc."""
    return hasattr(os, "memfd_create") and hasattr(_libc, "sem_clockwait")


def create(ranks: int) -> int:
    """The memory of so many ranks: a file descriptor, for each to inherit."""
    fileno = os.memfd_create("ostinato-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fileno, _head(ranks) + 2 * ranks * AREA)
    with mmap.mmap(fileno, 0) as memory:
        for number in range(ranks * ranks):
            semaphore = (ctypes.c_char * _SEMAPHORE).from_buffer(memory, number * _SEMAPHORE)
            _short.sem_init(ctypes.byref(semaphore), 1, 0)
            del semaphore  # the memory cannot be closed while something points into it
    return fileno


def _head(ranks: int) -> int:
    """Bytes of the semaphores, in whole pages."""
    return -(-ranks * ranks * _SEMAPHORE // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemory:
    """The connection of one rank with the others (`ops.ranks.between.Ranks`).

    A rank writes what it has into an area of its own, tells each of the others by a semaphore of these two, and waits
    for theirs. It has two areas and takes turns: when it writes into one again, all others have told it since that they
    have come to the exchange between, and so have read it. Sums are those of the ranks in their order, in float32, so a
    sum's bits depend on its own terms alone.
    """

    def __init__(self, rank: Rank, fileno: int) -> None:
        """`fileno` as `create` gives it."""
        self.rank, self.number = rank, rank.number
        self.check: Callable[[], None] = lambda: None
        """Called now and then while it waits; raises if it waits in vain."""
        memory = mmap.mmap(fileno, 0)
        self._semaphores = [
            [
                (ctypes.c_char * _SEMAPHORE).from_buffer(memory, (by * rank.of + of) * _SEMAPHORE)
                for of in range(rank.of)
            ]
            for by in range(rank.of)
        ]
        areas = torch.frombuffer(memory, dtype=torch.uint8, offset=_head(rank.of)).view(2, rank.of, AREA)
        self._areas: dict[torch.dtype, torch.Tensor] = {torch.uint8: areas}
        self._turn = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with what all other ranks have in its place added, in place. Errors as `_wait`."""
        flat = x.contiguous().view(-1)
        for piece in self._pieces(flat):
            first, second, *others = self._exchanged(piece)
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
        """What each rank has, in their order. Errors as `_wait`."""
        return self._gathered(x, is_wanted=True)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """The same on the first rank, None on the others."""
        return self._gathered(x, is_wanted=self.rank.leads) or None

    def _gathered(self, x: torch.Tensor, *, is_wanted: bool) -> list[torch.Tensor]:
        found = [torch.empty(x.shape, dtype=x.dtype) for _ in range(self.rank.of if is_wanted else 0)]
        begin = 0
        for piece in self._pieces(x.contiguous().view(-1)):
            parts, end = self._exchanged(piece), begin + len(piece)
            for whole, part in zip(found, parts, strict=False):
                whole.view(-1)[begin:end] = part
            begin = end
        return found

    def _pieces(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from flat.split(AREA // flat.element_size())

    def _exchanged(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has given in this exchange, until the one behind the next."""
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
        """Until another rank has come. RankError on the first one if a rank lives and does not come; what `check`
        raises."""
        begin = time.monotonic()
        while _short.sem_trywait(semaphore):
            if time.monotonic() - begin < SPIN:
                os.sched_yield()
                continue
            until = time.monotonic() + _GLANCE
            at = _Timespec(int(until), int(until % 1 * 1e9))
            if not _libc.sem_clockwait(semaphore, _CLOCK_MONOTONIC, ctypes.byref(at)):
                return
            self.check()
            if self.rank.leads and time.monotonic() - begin > waiting.PATIENCE:
                raise waiting.does_not_answer(self.rank.of)
