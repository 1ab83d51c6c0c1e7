"""Connection of the ranks that share a model, as operations call it."""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """Connection of rank `number` with the others.

    All ranks make the same calls in the same order, with tensors of one shape and dtype.
    """

    number: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add the other ranks' tensors to `x`, in place, and return it."""
        ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `x`, in the order of ranks, on all of them."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return every rank's `x` on the first rank, and None on the others."""
        ...


class SingleRankCollectives:
    """Connection of the single rank of a model that is not sharded."""

    number = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        return [x]


NO_COLLECTIVES = SingleRankCollectives()
