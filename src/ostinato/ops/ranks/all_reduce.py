"""all_reduce: the sum of a tensor over the ranks of one model."""

from __future__ import annotations

import torch

from ostinato.ops.ranks.between import NO_COLLECTIVES, Collectives


def all_reduce(x: torch.Tensor, ranks: Collectives = NO_COLLECTIVES) -> torch.Tensor:
    """Add the other `ranks`' tensors to `x`, in place, and return it."""
    return ranks.all_reduce(x)
