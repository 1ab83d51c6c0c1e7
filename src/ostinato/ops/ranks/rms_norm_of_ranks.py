"""rms_norm_of_ranks: root-mean-square normalisation over channels that ranks share, with a gate or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ostinato.ops.ranks.between import ALONE, Ranks


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_ranks: int,
    gate: torch.Tensor | None = None,
    norm_before_gate: bool = False,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """`ops.rms_norm`, or with a `gate` `ops.gated_rms_norm` of one group, over the channels of all of `num_ranks`
    ranks, of which each has as many; in float32.

    `x` and `gate` [tokens, size], `weight` [size]: this rank's part -> [tokens, size] in the dtype of `gate`, or else
    of `weight`. `ranks` add up the sums of squares, one per token.
    """
    by = None if gate is None else F.silu(gate.float())
    y = x.float() if by is None or norm_before_gate else x.float() * by
    squares = ranks.all_reduce(y.square().sum(-1, keepdim=True))
    y = y * torch.rsqrt(squares / (num_ranks * x.shape[-1]) + eps) * weight.float()
    if by is not None and norm_before_gate:
        y = y * by
    return y.to(weight.dtype if gate is None else gate.dtype)


def by_kernels(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_ranks: int,
    gate: torch.Tensor | None = None,
    norm_before_gate: bool = False,
    *,
    ranks: Ranks,
    rms_norm: Callable[..., torch.Tensor],
    gated_rms_norm: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The same by kernels of the whole norm: each rank gets the channels of all, and keeps its own of the result.

    That sends `size` numbers per token in place of one, and gives the kernels' bits, whatever else is in the batch: how
    torch adds up squares, and takes an exponential, depends on how many rows there are."""
    x, weight = (torch.cat(ranks.all_gather(each.contiguous()), -1) for each in (x, weight))
    if gate is None:
        y = rms_norm(x, weight, eps)
    else:
        gate = torch.cat(ranks.all_gather(gate.contiguous()), -1)
        y = gated_rms_norm(x, gate, weight, eps, x.shape[-1], norm_before_gate, False)
    return y.chunk(num_ranks, -1)[ranks.number].contiguous()
