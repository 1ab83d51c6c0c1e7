"""moe: the experts of a mixture-of-experts layer, for tokens that a router has assigned."""

from __future__ import annotations

import torch

from ostinato.ops.blocks.formats import Blocks
from ostinato.ops.linear import linear


def moe(
    x: torch.Tensor,
    choices: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    up_blocks: Blocks | None = None,
    down_blocks: Blocks | None = None,
) -> torch.Tensor:
    """Sum weight * down(activation(up(x))) over each token's experts, plus `residual`.

    `x` and `residual` [tokens, in]; `choices` [tokens, 2, k] float32 as returned by `route`: the ids of experts and
    their weights; `up` [experts, inner, in] (for a gated activation twice as many rows, gates first); `down` [experts,
    in, inner]. With `up_scale` float32 [experts, inner] or [experts, inner, groups], and `down_scale` alike, the
    weights are int8 (see `ops.int8`) and multiplied exactly. With `up_blocks` and `down_blocks`, the row formats of one
    expert, they are uint8 [experts, rows, bytes of a row] (see `ops.blocks`). Experts are added up in float32, in
    ascending order. -> [tokens, in] in the dtype of `x`.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    expert_ids, expert_weights = choices.unbind(1)
    for expert in expert_ids.unique().tolist():
        token, choice = torch.where(expert_ids == expert)
        up_of, down_of = (None if scale is None else scale[int(expert)] for scale in (up_scale, down_scale))
        inner = linear(x[token], up[int(expert)], None, None, activation, None, None, up_of, group_size, up_blocks)
        y = linear(inner, down[int(expert)], weight_scale=down_of, group_size=group_size, blocks=down_blocks)
        out.index_add_(0, token, y.float() * expert_weights[token, choice].unsqueeze(-1))
    out = out.to(x.dtype)
    return out if residual is None else out.add_(residual)
