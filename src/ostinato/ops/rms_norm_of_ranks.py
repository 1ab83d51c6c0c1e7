"""rms_norm_of_ranks: root-mean-square normalisation over channels that ranks share, with a gate or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ostinato.ops.all_reduce import alone


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_ranks: int,
    gate: torch.Tensor | None = None,
    norm_before_gate: bool = False,
    ranks: Callable[[torch.Tensor], torch.Tensor] = alone,
) -> torch.Tensor:
    """`ops.rms_norm`, or with a `gate` `ops.gated_rms_norm` of one group, over the channels of all of `num_ranks`
    ranks, of which each has as many; in float32.

    `x` and `gate` [tokens, size], `weight` [size]: this rank's part -> [tokens, size] in the dtype of `gate`, or else
    of `weight`. The sums of squares, one per token, are added up by `ranks` as in `ops.all_reduce`.
    """
    by = None if gate is None else F.silu(gate.float())
    y = x.float() if by is None or norm_before_gate else x.float() * by
    squares = ranks(y.square().sum(-1, keepdim=True))
    y = y * torch.rsqrt(squares / (num_ranks * x.shape[-1]) + eps) * weight.float()
    if by is not None and norm_before_gate:
        y = y * by
    return y.to(weight.dtype if gate is None else gate.dtype)
