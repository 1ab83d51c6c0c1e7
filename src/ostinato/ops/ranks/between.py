"""What the ranks that share a model give each other, as operations call it."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """The connection of rank `number` with the others. All ranks make the same calls in the same order, with tensors of
    one shape and dtype."""

    number: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, to which what the other ranks have in its place was added, in place."""
        ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has, in their order, on all of them."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """The same on the first rank; None on the others."""
        ...


class Alone:
    """The one rank that has all of a model."""

    number = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        return [x]


ALONE = Alone()
