"""gated_activation: the second half of each token's values, gated by the first half."""

from __future__ import annotations

import torch

from ostinato.ops.activations import ACTIVATIONS


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gates) * values for `x` [tokens, 2 * size], the gates first -> [tokens, size].

    Computed in float32 (Shazeer 2020, arXiv 2002.05202). `activation` is one of `ACTIVATIONS` that does not halve the
    last dimension. `linear` applies a gated activation itself if nothing is added to its result first.
    """
    gates, values = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gates) * values).to(x.dtype)
