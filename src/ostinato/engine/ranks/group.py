"""The process group of the ranks that share a model: what they add up."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ostinato.plan.cuts import Rank

PATIENCE = timedelta(minutes=10)
"""For a rank that lives and does not come: a step may take long. One that has died is noticed at once, for its
connection ends."""


class Group:
    """The connection of one rank with the others: by gloo on CPUs, by NCCL on GPUs.

    NCCL needs a GPU for each rank, and has not been run.
    """

    def __init__(self, rank: Rank, meeting: Path, device: torch.device) -> None:
        """Waits until all ranks are there. `meeting` is a file that all can write to."""
        store = dist.FileStore(str(meeting), rank.of)
        self.rank = rank
        # torch types neither class in full.
        kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        options: Any = kind.Options() if device.type == "cuda" else kind._Options()
        options._timeout = PATIENCE
        if device.type == "cpu":
            # All ranks are on this machine; a host's name may lead elsewhere, or nowhere.
            options._devices = [kind.create_device(hostname="127.0.0.1")]
        self._group = kind(store, rank.number, rank.of, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with what all other ranks have in its place added, in place. RuntimeError if one has gone."""
        if x.is_contiguous():
            self._group.allreduce([x]).wait()
            return x
        return x.copy_(self.all_reduce(x.contiguous()))
