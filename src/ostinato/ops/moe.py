"""moe: the experts of a mixture-of-experts layer, for tokens that a router has assigned."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.activations import ACTIVATIONS
from ostinato.ops.linear import CODES
from ostinato.ops.native import DTYPES, Lowered, check_rows


def reference(
    x: torch.Tensor,
    choices: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(activation(up(x))), plus `residual`.

    `x` and `residual` [tokens, in]; `choices` [tokens, 2, k] float32 as `route` gives them: the numbers of experts, and
    their weights; `up` [experts, inner, in] (for a gated activation twice as many rows, gates first); `down`
    [experts, in, inner]. Experts are added up in float32, in ascending order. -> [tokens, in] in the dtype of `x`.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    function = ACTIVATIONS[activation]
    expert_ids, expert_weights = choices.unbind(1)
    for expert in expert_ids.unique().tolist():
        token, choice = torch.where(expert_ids == expert)
        y = F.linear(function(F.linear(x[token], up[int(expert)])), down[int(expert)])
        out.index_add_(0, token, y.float() * expert_weights[token, choice].unsqueeze(-1))
    out = out.to(x.dtype)
    return out if residual is None else out.add_(residual)


def lower(
    x: torch.Tensor,
    choices: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> Lowered:
    """As the reference."""
    check_rows("moe", x)
    assert all(each.is_contiguous() for each in (choices, up, down)), "moe: choices or weights are not contiguous"
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    experts, size, inner = down.shape
    return out, (
        x.shape[0],
        x.data_ptr(),
        x.stride(0),
        choices.data_ptr(),
        choices.shape[-1],
        up.data_ptr(),
        down.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        out.stride(0),
        experts,
        size,
        inner,
        CODES[activation],
        DTYPES[x.dtype],
    )
