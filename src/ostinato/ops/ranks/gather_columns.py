"""gather_columns: columns that ranks share, together on the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.ops.ranks.between import ALONE, Ranks


def reference(x: torch.Tensor, starts: Sequence[int], num_columns: int, ranks: Ranks = ALONE) -> torch.Tensor:
    """`x` [rows, columns], which each rank has from column `starts[rank]` on, -> on the first [rows, num_columns], on
    the others `x`. Where two have the same columns, those of the later one stand."""
    parts = ranks.gather(x)
    if parts is None:
        return x
    whole = x.new_empty((x.shape[0], num_columns))
    for start, part in zip(starts, parts, strict=True):
        whole[:, start : start + x.shape[1]] = part
    return whole
