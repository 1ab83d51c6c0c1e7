"""rms_norm_of_ranks: root-mean-square normalisation over sharded channels, with a gate or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ostinato.ops.ranks.between import NO_COLLECTIVES, Collectives


def rms_norm_of_ranks(
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
    """Compute `rms_norm_of_ranks` by kernels of the whole norm.

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
