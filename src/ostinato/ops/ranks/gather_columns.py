"""gather_columns: sharded columns, gathered on the first rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.ops.ranks.between import NO_COLLECTIVES, Collectives


def gather_columns(x: torch.Tensor, starts: Sequence[int], num_columns: int, ranks: Collectives = NO_COLLECTIVES) -> torch.Tensor:
    """Gather `x` [rows, columns], which each rank has from column `starts[rank]` on.

    -> [rows, num_columns] on the first rank, `x` on the others. If two ranks have the same columns, the later rank's
    are used.
    """
    parts = ranks.gather(x)
    if parts is None:
        return x
    whole = x.new_empty((x.shape[0], num_columns))
    for start, part in zip(starts, parts, strict=True):
        whole[:, start : start + x.shape[1]] = part
    return whole
