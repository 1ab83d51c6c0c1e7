"""gather_inputs: a rank's inputs of a matmul whose groups of inputs are reordered."""

from __future__ import annotations

import torch

from ostinato.ops.ranks.between import NO_COLLECTIVES, Collectives


def gather_inputs(x: torch.Tensor, order: torch.Tensor, ranks: Collectives = NO_COLLECTIVES) -> torch.Tensor:
    """Gather all inputs and return those of `order` int32 [in / ranks].

    `x` [tokens, in / ranks] is a rank's inputs, which follow those of the ranks before it -> [tokens, in / ranks].
    """
    return torch.cat(ranks.all_gather(x), dim=1).index_select(1, order)
