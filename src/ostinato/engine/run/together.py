"""Execution of a step in a tensor-parallel group: by a single rank, by the first rank or by a follower rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from ostinato.engine.run.inputs import Drafts
from ostinato.sample.sampler import Draw, choose
from ostinato.sample.state import Pick
from ostinato.schedule.batch import Batch
from ostinato.speculate.proposer import Choose

if TYPE_CHECKING:
    from ostinato.engine.ranks.group import Group
    from ostinato.engine.ranks.shared import SharedMemory

T = TypeVar("T")


class Together(Protocol):
    """Tensor-parallel group. All ranks do the same, except that only the first schedules and samples."""

    chooses: Choose
    """Function that samples drafts on the first rank. Experiments may replace it."""

    @property
    def group(self) -> Group | SharedMemory | None:
        """Connection of the ranks; None for a single rank."""
        ...

    def step(self, batch: Batch, drafts: Drafts, compute: Callable[[], T], /) -> T:
        """Call `compute`, which computes a step, while the other ranks do the same.

        `drafts` are those that need no weights.
        """
        ...

    def logits(self, positions: Sequence[int], compute: Callable[[], T], /) -> T:
        """Call `compute`, which computes the logits at these positions of the last step, while the other ranks do."""
        ...

    def choose(self, logits: torch.Tensor, picks: Sequence[Pick], draw: Draw, /) -> dict[int, int]:
        """Return the drafts that `chooses` samples on the first rank; all ranks continue with them."""
        ...


class ForItself:
    """Single rank: a process that drives no other ranks, either alone or as a follower."""

    def __init__(self, group: Group | SharedMemory | None = None) -> None:
        self.group = group
        self.chooses: Choose = choose

    def step(self, _batch: Batch, _drafts: Drafts, compute: Callable[[], T]) -> T:
        return compute()

    def logits(self, _positions: Sequence[int], compute: Callable[[], T]) -> T:
        return compute()

    def choose(self, logits: torch.Tensor, picks: Sequence[Pick], draw: Draw) -> dict[int, int]:
        return self.chooses(logits, picks, draw)
