"""embedding_of_ranks: the vectors of tokens, with a vocabulary that is sharded by rows."""

from __future__ import annotations

import torch

from ostinato.ops import embedding
from ostinato.ops.blocks.formats import Blocks
from ostinato.ops.ranks.between import NO_COLLECTIVES, Collectives


def embedding_of_ranks(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    multiplier: float,
    first: int,
    own: tuple[int, int],
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
    ranks: Collectives = NO_COLLECTIVES,
) -> torch.Tensor:
    """Compute `ops.embedding`, where `weight` has the rows from `first` on.

    This rank computes the vectors of the tokens `own[0]` to `own[1] - 1`, and zeros for others, which other `ranks`
    compute. So each sum is exactly one rank's vector.
    """
    is_own = (token_ids >= own[0]) & (token_ids < own[1])
    rows = torch.where(is_own, token_ids - first, 0)
    vectors = embedding.embedding(rows, weight, multiplier, weight_scale, group_size, out_dtype, blocks)
    return ranks.all_reduce(vectors.masked_fill(~is_own[:, None], 0.0))
