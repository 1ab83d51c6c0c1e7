"""Ranks that are threads: what they give each other, without processes."""

from __future__ import annotations

import threading

import torch

from tests.support.patience import PATIENCE


class Threads:
    """Where the threads of `count` ranks meet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls: dict[str, int] = {"all_reduce": 0, "all_gather": 0, "gather": 0}
        self._all: list[torch.Tensor] = [torch.empty(0)] * count
        self._barrier = threading.Barrier(count, timeout=PATIENCE)

    def exchange(self, number: int, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        self._all[number] = x.clone()
        self._barrier.wait()
        found = [each.clone() for each in self._all]
        self._barrier.wait()
        self.calls[what] += number == 0
        return found

    def of(self, number: int) -> RankOfThreads:
        return RankOfThreads(self, number)


class RankOfThreads:
    """One thread's side (`ops.ranks.between.Ranks`). Sums are those of the ranks in their order."""

    def __init__(self, threads: Threads, number: int) -> None:
        self._threads, self.number = threads, number

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._threads.exchange(self.number, x, "all_reduce")
        total = first.float()
        for each in others:
            total += each
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._threads.exchange(self.number, x, "all_gather")

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        parts = self._threads.exchange(self.number, x, "gather")
        return parts if self.number == 0 else None
