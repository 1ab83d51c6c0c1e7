"""gather_inputs: what a rank multiplies where the groups of a matrix's inputs have an order of their own."""

from __future__ import annotations

import torch

from ostinato.ops.ranks.between import ALONE, Ranks


def reference(x: torch.Tensor, order: torch.Tensor, ranks: Ranks = ALONE) -> torch.Tensor:
    """`x` [tokens, in / ranks], of which each rank has the inputs behind those of the ranks before it -> of all inputs
    those of `order` int32 [in / ranks], [tokens, in / ranks]."""
    return torch.cat(ranks.all_gather(x), dim=1).index_select(1, order)
