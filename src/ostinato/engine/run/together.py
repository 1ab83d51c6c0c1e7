"""Execution of a step in a tensor-parallel group: by a single rank, by the first rank or by a follower rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from ostinato.engine.run.inputs import Drafts
from ostinato.sample.sampler import SampleKernel, select_tokens
from ostinato.sample.state import PendingToken
from ostinato.schedule.batch import Batch
from ostinato.speculate.proposer import TokenSelector

if TYPE_CHECKING:
    from ostinato.engine.ranks.group import RankProcessGroup
    from ostinato.engine.ranks.shared import SharedMemoryGroup

T = TypeVar("T")


class TensorParallel(Protocol):
    """Tensor-parallel group. All ranks do the same, except that only the first schedules and samples."""

    draft_selector: TokenSelector
    """Function that samples drafts on the first rank. Experiments may replace it."""

    @property
    def group(self) -> RankProcessGroup | SharedMemoryGroup | None:
        """Connection of the ranks; None for a single rank."""
        ...

    def step(self, batch: Batch, drafts: Drafts, compute: Callable[[], T], /) -> T:
        """Call `execute_model`, which computes a step, while the other ranks do the same.

        `drafts` are those that need no weights.
        """
        ...

    def logits(self, positions: Sequence[int], compute: Callable[[], T], /) -> T:
        """Call `execute_model`, which computes the logits at these positions of the last step, while the other ranks do."""
        ...

    def select_drafts(self, logits: torch.Tensor, picks: Sequence[PendingToken], draw: SampleKernel, /) -> dict[int, int]:
        """Return the drafts that `draft_selector` samples on the first rank; all ranks continue with them."""
        ...


class SingleRank:
    """Single rank: a process that drives no other ranks, either alone or as a follower."""

    def __init__(self, group: RankProcessGroup | SharedMemoryGroup | None = None) -> None:
        self.group = group
        self.draft_selector: TokenSelector = select_tokens

    def step(self, _batch: Batch, _drafts: Drafts, compute: Callable[[], T]) -> T:
        return compute()

    def logits(self, _positions: Sequence[int], compute: Callable[[], T]) -> T:
        return compute()

    def select_drafts(self, logits: torch.Tensor, picks: Sequence[PendingToken], draw: SampleKernel) -> dict[int, int]:
        return self.draft_selector(logits, picks, draw)
