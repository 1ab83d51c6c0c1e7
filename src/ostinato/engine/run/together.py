"""How a step is computed with the other ranks that share the model: by one process, by the first rank or by another."""

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
    """All ranks do the same, but that the first alone schedules and samples."""

    chooses: Choose
    """How the first rank chooses drafts. Whoever tries an engine may have it choose others."""

    @property
    def group(self) -> Group | SharedMemory | None:
        """The connection of the ranks; None: there is one."""
        ...

    def step(self, batch: Batch, drafts: Drafts, compute: Callable[[], T], /) -> T:
        """`compute`, which computes a step, while the other ranks do the same. `drafts` are those that need no
        weights."""
        ...

    def logits(self, positions: Sequence[int], compute: Callable[[], T], /) -> T:
        """`compute`, which computes the logits at these positions of the last step, while the other ranks do."""
        ...

    def choose(self, logits: torch.Tensor, picks: Sequence[Pick], draw: Draw, /) -> dict[int, int]:
        """The drafts that `chooses` chooses, on the first rank, and that all ranks go on with."""
        ...


class ForItself:
    """One process drives no other ranks, be it alone or driven itself."""

    def __init__(self, group: Group | SharedMemory | None = None) -> None:
        self.group = group
        self.chooses: Choose = choose

    def step(self, _batch: Batch, _drafts: Drafts, compute: Callable[[], T]) -> T:
        return compute()

    def logits(self, _positions: Sequence[int], compute: Callable[[], T]) -> T:
        return compute()

    def choose(self, logits: torch.Tensor, picks: Sequence[Pick], draw: Draw) -> dict[int, int]:
        return self.chooses(logits, picks, draw)
