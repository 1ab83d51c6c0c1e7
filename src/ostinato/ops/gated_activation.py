"""gated_activation: the second half of each token's values, gated by the first."""

from __future__ import annotations

import torch

from ostinato.ops.activations import ACTIVATIONS


def reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`x` [tokens, 2 * size], the gates first -> [tokens, size]: activation(gates) * values (Shazeer 2020, arXiv
    2002.05202), computed in float32.

    `activation` is one of `ACTIVATIONS` that halves nothing. `linear` ends with it where nothing is added to its result
    first.
    """
    gates, values = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gates) * values).to(x.dtype)
