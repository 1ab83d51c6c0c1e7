"""route on a GPU: scores in tiles of tokens and experts, then the selection for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import products as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.products import product


@triton.jit(do_not_specialize=["tokens"])
def score_experts(
    x,
    weight,
    scores,
    tokens,
    hidden,
    experts,
    x_token,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute a tile of x W^T in float32."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_expert = token < tokens, expert < experts
    total = product(
        x + tl.program_id(0).to(tl.int64) * ROWS * x_token,
        tl.arange(0, ROWS) * x_token,
        is_token,
        weight + tl.program_id(1) * OUTPUTS * hidden,
        scores,
        hidden,
        is_expert,
        hidden,
        hidden,
        1,
        "plain",
        0,
        ROWS,
        OUTPUTS,
        INPUTS,
    )
    where = scores + token[:, None] * experts + expert[None, :]
    tl.store(where, total, mask=is_token[:, None] & is_expert[None, :])


@triton.jit
def choose_experts(
    scores,
    correction_bias,
    choices,
    scaling,
    least_sum,
    experts,
    group_size,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OVER_ALL: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Select the experts of one token.

    No comparison selects NaN; in its place some valid expert is selected.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    is_expert = expert < experts
    score = tl.load(scores + token * experts + expert, mask=is_expert, other=float("-inf"))
    if HAS_BIAS:
        weight = 1 / (1 + tl.exp(-score))
        choice = weight + tl.load(correction_bias + expert, mask=is_expert, other=0.0)
        choice = tl.where(is_expert, choice, float("-inf"))
    else:
        weight = score
        choice = score
    if NUM_GROUPS > 1:
        group = tl.arange(0, GROUPS_WIDTH)
        of_groups = tl.full([GROUPS_WIDTH], float("-inf"), tl.float32)
        for i in range(NUM_GROUPS):
            own = tl.where((expert // group_size == i) & is_expert, choice, float("-inf"))
            best = tl.max(own, 0)
            place = tl.min(tl.where(own == best, expert, WIDTH), 0)
            second = tl.max(tl.where(expert == place, float("-inf"), own), 0)
            of_groups = tl.where(group == i, best + second, of_groups)
        is_allowed = expert < 0
        for _ in range(TOP_GROUPS):
            best = tl.max(of_groups, 0)
            place = tl.min(tl.where(of_groups == best, group, GROUPS_WIDTH), 0)
            is_allowed = is_allowed | (expert // group_size == place)
            of_groups = tl.where(group == place, float("-inf"), of_groups)
        choice = tl.where(is_allowed, choice, float("-inf"))
    rank = tl.arange(0, TOP_K_WIDTH)
    ids = tl.zeros([TOP_K_WIDTH], tl.int32)
    weights = tl.full([TOP_K_WIDTH], float("-inf"), tl.float32)
    is_taken = expert < 0
    for i in range(TOP_K):
        left = tl.where(is_taken, float("-inf"), choice)
        best = tl.max(left, 0)
        place = tl.min(tl.where((left == best) & is_expert & (is_taken == 0), expert, experts - 1), 0)
        is_taken = is_taken | (expert == place)
        own = tl.max(tl.where(expert == place, weight, float("-inf")), 0)
        ids = tl.where(rank == i, place, ids)
        weights = tl.where(rank == i, own, weights)
    is_rank = rank < TOP_K
    if HAS_BIAS:
        if NORMALIZE:
            weights = weights / (tl.sum(tl.where(is_rank, weights, 0.0), 0) + least_sum)
    else:
        best = tl.max(weights, 0)
        weights = tl.exp(weights - best)
        if OVER_ALL:
            weights = weights / tl.sum(tl.exp(score - best), 0)
        else:
            weights = weights / tl.sum(tl.where(is_rank, weights, 0.0), 0)
    where = choices + token * 2 * TOP_K + rank
    tl.store(where, ids.to(tl.float32), mask=is_rank)
    tl.store(where + TOP_K, weights * scaling, mask=is_rank)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = False,
    scaling: float = 1.0,
    over_all: bool = False,
    least_sum: float = 1e-20,
) -> torch.Tensor:
    """Compute `ops.route`; its reference documents arguments and result."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    choices = torch.empty((tokens, 2, top_k), dtype=torch.float32, device=x.device)
    if weight.dtype != x.dtype:
        x, weight = x.float(), weight.float()
    scores = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    tile, choice = launches.route_launches(
        experts=experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        element_bytes=x.element_size(),
        capability=launcher.capability(x),
    )
    launcher.run(
        score_experts,
        (cdiv(tokens, tile.blocks["ROWS"]), cdiv(experts, tile.blocks["OUTPUTS"])),
        tile,
        x=x,
        weight=weight,
        scores=scores,
        tokens=tokens,
        hidden=hidden,
        experts=experts,
        x_token=x.stride(0),
    )
    launcher.run(
        choose_experts,
        (tokens,),
        choice,
        scores=scores,
        correction_bias=correction_bias,
        choices=choices,
        scaling=scaling,
        least_sum=least_sum,
        experts=experts,
        group_size=experts // num_groups,
        HAS_BIAS=correction_bias is not None,
        NORMALIZE=normalize,
        OVER_ALL=over_all,
    )
    return choices
