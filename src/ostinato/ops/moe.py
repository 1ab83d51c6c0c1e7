"""moe: the experts of a mixture-of-experts layer, for tokens that a router has assigned."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.activations import ACTIVATIONS


def reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(activation(up(x))).

    `x` [tokens, in]; `expert_ids`, `expert_weights` [tokens, k]; `up` [experts, inner, in] (for a gated activation
    twice as many rows, gates first); `down` [experts, in, intermediate]. Tokens are added up in float32, experts
    in ascending order. -> [tokens, in] in the dtype of `x`.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    function = ACTIVATIONS[activation]
    for expert in expert_ids.unique().tolist():
        token, choice = torch.where(expert_ids == expert)
        y = F.linear(function(F.linear(x[token], up[expert])), down[expert])
        out.index_add_(0, token, y.float() * expert_weights[token, choice].float().unsqueeze(-1))
    return out.to(x.dtype)
