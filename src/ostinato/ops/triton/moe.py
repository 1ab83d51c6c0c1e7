"""`moe` and `route` on a GPU.

`moe` sorts choices by expert on the device, then each tile of an expert's choices meets its weights. A choice is one of
a token's experts; choice `token * k + j` is the token's j-th. The grids have as many tiles as there could be; programs
of tiles without choices return at once. `route` scores tiles of tokens and experts, then selects for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import matmul as launches
from ostinato.ops.launch_tables.launch import Launch, cdiv, num_tiles
from ostinato.ops.operations import GATED, PIECES
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import Blocks
from ostinato.ops.triton import common
from ostinato.ops.triton.common import activate, find_tile, to_dtype
from ostinato.ops.triton.matmul import of_one_format, product


@triton.jit(do_not_specialize=["count"])
def sort_choices(choices, order, starts, count, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Write an expert's choices, ascending, into `order` after those before; their number to `starts` [experts + 1]."""
    expert = tl.program_id(0)
    before = 0
    for base in range(0, count, BLOCK):
        choice = base + tl.arange(0, BLOCK)
        where = choices + choice // TOP_K * 2 * TOP_K + choice % TOP_K
        chosen = tl.load(where, mask=choice < count, other=float("inf"))
        before += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    if expert == experts - 1:
        tl.store(starts + experts, count)
    for base in range(0, count, BLOCK):
        choice = base + tl.arange(0, BLOCK)
        where = choices + choice // TOP_K * 2 * TOP_K + choice % TOP_K
        is_own = (tl.load(where, mask=choice < count, other=-1.0) == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(is_own, 0) - 1, choice, mask=is_own != 0)
        before += tl.sum(is_own, 0)


@triton.jit(do_not_specialize=["choices"])
def expert_product(
    x,
    order,
    starts,
    weight,
    weight_scale,
    bias,
    alpha,
    limit,
    offset,
    out,
    choices,
    experts,
    in_size,
    out_size,
    group_size,
    groups,
    x_row,
    weight_row,
    DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute activation(x W^T) for a tile of an expert's choices: row c // DIVISOR of `x` to row c of `out`."""
    expert, first, end = find_tile(starts, experts, choices, tl.program_id(0), ROWS, SPAN)
    if (first < end) & (expert < experts):
        place = first + tl.arange(0, ROWS)
        is_row = place < end
        choice = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < out_size
        row = choice // DIVISOR * x_row
        FACTOR: tl.constexpr = 2 if ACTIVATION == "swiglu" or ACTIVATION == "geglu" else 1
        first_output = expert.to(tl.int64) * out_size * FACTOR + tl.program_id(1) * OUTPUTS
        value = product(
            x,
            row,
            is_row,
            weight + first_output * weight_row,
            weight_scale + first_output * groups,
            weight_row,
            is_output,
            in_size,
            group_size,
            groups,
            WEIGHTS,
            BLOCK,
            PIECE,
            ROWS,
            OUTPUTS,
            INPUTS,
        )
        added = expert * out_size * FACTOR + output
        if bias is not None:
            value += tl.load(bias + added, mask=is_output, other=0.0)[None, :]
        if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
            # The first matmul computed the gates.
            first_output += out_size
            other = product(
                x,
                row,
                is_row,
                weight + first_output * weight_row,
                weight_scale + first_output * groups,
                weight_row,
                is_output,
                in_size,
                group_size,
                groups,
                WEIGHTS,
                BLOCK,
                PIECE,
                ROWS,
                OUTPUTS,
                INPUTS,
            )
            if bias is not None:
                other += tl.load(bias + out_size + added, mask=is_output, other=0.0)[None, :]
            if limit is not None:
                value = tl.where(value > limit, limit, value)
                other = tl.where(other > limit, limit, tl.where(other < -limit, -limit, other))
                value = value / (1 + tl.exp(-alpha * value)) * (other + offset)
            else:
                value = activate(value, ACTIVATION) * other
        else:
            value = activate(value, ACTIVATION)
        where = out + choice[:, None] * out_size + output[None, :]
        tl.store(where, to_dtype(value, out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def add_choices(
    of_choices,
    choices,
    residual,
    out,
    size,
    residual_token,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up a part of one token: its experts' outputs times their weights, in float32."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = element < size
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(TOP_K):
        weight = tl.load(choices + (token * 2 + 1) * TOP_K + i)
        value = tl.load(of_choices + (token * TOP_K + i) * size + element, mask=is_own, other=0.0)
        total += value.to(tl.float32) * weight
    if HAS_RESIDUAL:
        total += tl.load(residual + token * residual_token + element, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out + token * size + element, to_dtype(total, out.dtype.element_ty), mask=is_own)


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
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    clamp: tuple[float, float, float] | None = None,
) -> torch.Tensor:
    """Compute `ops.moe`; its reference documents arguments and result."""
    (tokens, size), experts, top_k = x.shape, len(down), choices.shape[2]
    inner = up.shape[1] // (2 if activation in GATED else 1)
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    count = tokens * top_k
    sort, inward, outward, add = launches.moe_launches(
        tokens=tokens,
        num_experts=experts,
        top_k=top_k,
        element_bytes=x.element_size(),
        capability=common.capability(x),
        group_size=min(of_one_format(up_blocks)[1], of_one_format(down_blocks)[1])
        or (None if up_scale is None else group_size),
        in_blocks=up_blocks is not None,
        in_pieces=any(of_one_format(blocks)[0] in PIECES for blocks in (up_blocks, down_blocks)),
    )
    order = torch.empty(count, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    common.run(
        sort_choices, (experts,), sort, choices=choices, order=order, starts=starts, count=count, experts=experts
    )
    inside = torch.empty((count, inner), dtype=x.dtype, device=x.device)
    _expert_product(
        inward, x, order, starts, up, up_scale, group_size, up_blocks, inside, top_k, activation, up_bias, clamp
    )
    of_choices = torch.empty((count, size), dtype=x.dtype, device=x.device)
    of_down = (down, down_scale, group_size, down_blocks, of_choices, 1, None, down_bias, None)
    _expert_product(outward, inside, order, starts, *of_down)
    common.run(
        add_choices,
        (tokens, cdiv(size, add.blocks["BLOCK"])),
        add,
        of_choices=of_choices,
        choices=choices,
        residual=residual,
        out=out,
        size=size,
        residual_token=0 if residual is None else residual.stride(0),
        HAS_RESIDUAL=residual is not None,
    )
    return out


def _expert_product(
    launch: Launch,
    x: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    group_size: int | None,
    blocks: Blocks | None,
    out: torch.Tensor,
    divisor: int,
    activation: str | None,
    bias: torch.Tensor | None,
    clamp: tuple[float, float, float] | None,
) -> None:
    """Write activation(x W^T + bias) of every choice to its row of `out`; choice c reads row c // divisor of `x`."""
    (count, out_size), in_size, experts = out.shape, x.shape[1], len(weight)
    group = in_size if group_size is None or weight_scale is None else group_size
    weights, block = of_one_format(blocks)
    common.run(
        expert_product,
        (num_tiles(count, experts, launch.blocks["ROWS"]), cdiv(out_size, launch.blocks["OUTPUTS"])),
        launch,
        x=x,
        order=order,
        starts=starts,
        weight=weight,
        weight_scale=weight if weight_scale is None else weight_scale,
        bias=bias,
        alpha=None if clamp is None else clamp[0],
        limit=None if clamp is None else clamp[1],
        offset=None if clamp is None else clamp[2],
        out=out,
        choices=count,
        experts=experts,
        in_size=in_size,
        out_size=out_size,
        group_size=group,
        groups=quantize.num_groups(in_size, group),
        x_row=x.stride(0),
        weight_row=weight.stride(1),
        DIVISOR=divisor,
        ACTIVATION=activation or "none",
        WEIGHTS=weights if weight_scale is None else "int8",
        BLOCK=block,
        PIECE=PIECES.get(weights, 0),
    )


@triton.jit(do_not_specialize=["tokens"])
def score_experts(
    x, weight, scores, tokens, hidden, experts, x_token, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
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
    bias,
    correction_bias,
    expert_scales,
    choices,
    scaling,
    sum_epsilon,
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
    """Select the experts of one token. No comparison selects NaN; in its place some valid expert is selected."""
    token = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    is_expert = expert < experts
    score = tl.load(scores + token * experts + expert, mask=is_expert, other=float("-inf"))
    if bias is not None:
        score += tl.load(bias + expert, mask=is_expert, other=0.0)
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
            weights = weights / (tl.sum(tl.where(is_rank, weights, 0.0), 0) + sum_epsilon)
    else:
        best = tl.max(weights, 0)
        weights = tl.exp(weights - best)
        if OVER_ALL:
            weights = weights / tl.sum(tl.exp(score - best), 0)
        else:
            weights = weights / tl.sum(tl.where(is_rank, weights, 0.0), 0)
    weights = weights * scaling
    if expert_scales is not None:
        weights = weights * tl.load(expert_scales + ids, mask=is_rank, other=0.0)
    where = choices + token * 2 * TOP_K + rank
    tl.store(where, ids.to(tl.float32), mask=is_rank)
    tl.store(where + TOP_K, weights, mask=is_rank)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = False,
    scaling: float = 1.0,
    softmax_over_all: bool = False,
    sum_epsilon: float = 1e-20,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.route`; its reference documents arguments and result."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    choices = torch.empty((tokens, 2, top_k), dtype=torch.float32, device=x.device)
    if weight.dtype != x.dtype:
        x, weight = x.float(), weight.float()
    scores = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    tile, choice = launches.route_launches(
        num_experts=experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        element_bytes=x.element_size(),
        capability=common.capability(x),
    )
    common.run(
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
    common.run(
        choose_experts,
        (tokens,),
        choice,
        scores=scores,
        bias=bias,
        correction_bias=correction_bias,
        expert_scales=expert_scales,
        choices=choices,
        scaling=scaling,
        sum_epsilon=sum_epsilon,
        experts=experts,
        group_size=experts // num_groups,
        HAS_BIAS=correction_bias is not None,
        NORMALIZE=normalize,
        OVER_ALL=softmax_over_all,
    )
    return choices
