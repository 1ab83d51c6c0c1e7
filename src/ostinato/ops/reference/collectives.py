"""References of the operations in which the ranks of one model wait for each other.

`all_reduce` sums a tensor over the ranks. `sharded_embedding` returns the vectors of tokens from a vocabulary that is
sharded by rows. `gather_columns` gathers sharded columns on the first rank. `gather_act_order` returns a rank's inputs
of a matmul whose groups of inputs are reordered. `sharded_rms_norm` normalises over sharded channels, with a gate or
without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ostinato.ops.arrays import NO_COLLECTIVES, Collectives
from ostinato.ops.quant.block_formats import Blocks
from ostinato.ops.reference import pointwise


def all_reduce(x: torch.Tensor, ranks: Collectives = NO_COLLECTIVES) -> torch.Tensor:
    """Add the other `ranks`' tensors to `x`, in place, and return it."""
    return ranks.all_reduce(x)


def sharded_embedding(
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
    vectors = pointwise.embedding(rows, weight, multiplier, weight_scale, group_size, out_dtype, blocks)
    return ranks.all_reduce(vectors.masked_fill(~is_own[:, None], 0.0))


def gather_columns(
    x: torch.Tensor, starts: Sequence[int], num_columns: int, ranks: Collectives = NO_COLLECTIVES
) -> torch.Tensor:
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


def gather_act_order(x: torch.Tensor, order: torch.Tensor, ranks: Collectives = NO_COLLECTIVES) -> torch.Tensor:
    """Gather all inputs and return those of `order` int32 [in / ranks].

    `x` [tokens, in / ranks] is a rank's inputs, which follow those of the ranks before it -> [tokens, in / ranks].
    """
    return torch.cat(ranks.all_gather(x), dim=1).index_select(1, order)


def sharded_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_ranks: int,
    gate: torch.Tensor | None = None,
    norm_before_gate: bool = False,
    ranks: Collectives = NO_COLLECTIVES,
) -> torch.Tensor:
    """Compute `ops.rms_norm`, or with a `gate` `ops.gated_rms_norm` of one group, over the channels of all ranks.

    Each of `num_ranks` ranks has an equal number of channels. Computed in float32. `x` and `gate` [tokens, size],
    `weight` [size]: this rank's part -> [tokens, size] in the dtype of `gate`, or else of `weight`. `ranks` add up the
    sums of squares, one per token.
    """
    by = None if gate is None else F.silu(gate.float())
    y = x.float() if by is None or norm_before_gate else x.float() * by
    squares = ranks.all_reduce(y.square().sum(-1, keepdim=True))
    y = y * torch.rsqrt(squares / (num_ranks * x.shape[-1]) + eps) * weight.float()
    if by is not None and norm_before_gate:
        y = y * by
    return y.to(weight.dtype if gate is None else gate.dtype)


def rms_norm_gathered(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_ranks: int,
    gate: torch.Tensor | None = None,
    norm_before_gate: bool = False,
    *,
    ranks: Collectives,
    rms_norm: Callable[..., torch.Tensor],
    gated_rms_norm: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute `sharded_rms_norm` by kernels of the whole norm.

    Each rank gathers all channels, and keeps its part of the result. That sends `size` numbers per token in place of
    one, and gives the kernels' bits, whatever else is in the batch: the order in which torch adds up squares, and its
    exponential, depend on the number of rows.
    """
    x, weight = (torch.cat(ranks.all_gather(each.contiguous()), -1) for each in (x, weight))
    if gate is None:
        y = rms_norm(x, weight, eps)
    else:
        gate = torch.cat(ranks.all_gather(gate.contiguous()), -1)
        y = gated_rms_norm(x, gate, weight, eps, x.shape[-1], norm_before_gate, False)
    return y.chunk(num_ranks, -1)[ranks.number].contiguous()
