"""Process group of ranks that are on GPUs or can share no memory: sums and gathers."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ostinato.distributed import rank_messages
from ostinato.plan.tensor_parallel import Rank

_GLANCE = timedelta(seconds=0.1)
"""Time between looks whether the wait was interrupted, for example by Ctrl-C."""

_GLOO_TIMEOUT = timedelta(days=365)
"""Timeout on CPUs: the other ranks end with the first one, however long it takes."""

_NCCL_TIMEOUT = timedelta(minutes=10)
"""NCCL's timeout for a rank that is late. NCCL waits on the device."""


class RankProcessGroup:
    """Connection of one rank with the others (`Collectives`): by gloo on CPUs, by NCCL on GPUs.

    A rank that has died is noticed at once, for its connection ends. NCCL needs a GPU for each rank, and has not been
    run. With `in_order`, an element's sum is taken over the ranks in their order, in float32, and does not depend
    on the rest of the tensor. A ring would begin with a different rank for each part of it.
    """

    def __init__(self, rank: Rank, meeting: Path, device: torch.device, in_order: bool = False) -> None:
        """Wait until all ranks are there. `meeting` is a file that all can write to."""
        store = dist.FileStore(str(meeting), rank.of)
        self.rank, self.number = rank, rank.number
        self._in_order = in_order
        # torch types neither class in full.
        kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        options: Any = kind.Options() if device.type == "cuda" else kind._Options()
        self._is_on_host = device.type == "cpu"
        options._timeout = _GLOO_TIMEOUT if self._is_on_host else _NCCL_TIMEOUT
        if self._is_on_host:
            # All ranks are on this machine; a host's name may lead elsewhere, or nowhere.
            options._devices = [kind.create_device(hostname="127.0.0.1")]
        self._group = kind(store, rank.number, rank.of, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up `x` over all ranks in place, and return it. RankError if one is late, RuntimeError if one has gone."""
        if self._in_order:
            first, *others = self.all_gather(x)
            total = first.float()
            for each in others:
                total += each
            return x.copy_(total)
        if x.is_contiguous():
            self._wait(self._group.allreduce([x]))
            return x
        return x.copy_(self.all_reduce(x.contiguous()))

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the `x` of each rank, in their order. Errors as `all_reduce`."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.rank.of)]
        self._wait(self._group.allgather([parts], [x]))
        return parts

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the `x` of each rank on the first rank, None on the others."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.rank.of)] if self.rank.leads else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(self._group.gather([parts] if parts else [], [x], options))
        return parts or None

    def _wait(self, work: Any) -> None:
        if not self._is_on_host:
            work.wait()
            return
        end = time.monotonic() + rank_messages.RANK_TIMEOUT if self.rank.leads else float("inf")
        while not work.is_completed():
            with suppress(RuntimeError):  # the glance is over; any other error is raised below
                work.wait(_GLANCE)
            if time.monotonic() > end and not work.is_completed():
                raise rank_messages.rank_timeout_error(self.rank.of)
        work.wait()
