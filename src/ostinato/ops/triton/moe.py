"""moe on a GPU: choices are sorted by expert on the device, then each tile of an expert's choices meets its weights.

A choice is one of a token's experts; choice `token * k + j` is the token's j-th. The grids have as many tiles as there
could be; programs of tiles without choices return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops import int8
from ostinato.ops.blocks.formats import Blocks
from ostinato.ops.launches import products as launches
from ostinato.ops.launches.table import Launch, cdiv
from ostinato.ops.launches.tiles import num_tiles
from ostinato.ops.results import GATED
from ostinato.ops.triton import launcher
from ostinato.ops.triton.activations import activate
from ostinato.ops.triton.blocks import of_one_format
from ostinato.ops.triton.launcher import to_dtype
from ostinato.ops.triton.products import product
from ostinato.ops.triton.tiles import find_tile


@triton.jit(do_not_specialize=["count"])
def sort_choices(choices, order, starts, count, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Write one expert's choices, in ascending order, into `order` after those of the experts before it.

    Their number goes to `starts` [experts + 1].
    """
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
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute activation(x W^T) of a tile of one expert's choices.

    Choice c reads row c // DIVISOR of `x` and writes row c of `out`.
    """
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
            ROWS,
            OUTPUTS,
            INPUTS,
        )
        if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
            # The first matmul computed the gates.
            first_output += out_size
            value = activate(value, ACTIVATION) * product(
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
                ROWS,
                OUTPUTS,
                INPUTS,
            )
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
) -> torch.Tensor:
    """Compute `ops.moe`; its reference documents arguments and result."""
    (tokens, size), experts, top_k = x.shape, len(down), choices.shape[2]
    assert of_one_format(up_blocks) == of_one_format(down_blocks), "all weights of experts have one format"
    inner = up.shape[1] // (2 if activation in GATED else 1)
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    count = tokens * top_k
    sort, inward, outward, add = launches.moe_launches(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        element_bytes=x.element_size(),
        capability=launcher.capability(x),
        group_size=of_one_format(up_blocks)[1] or (None if up_scale is None else group_size),
        in_blocks=up_blocks is not None,
    )
    order = torch.empty(count, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    launcher.run(
        sort_choices, (experts,), sort, choices=choices, order=order, starts=starts, count=count, experts=experts
    )
    inside = torch.empty((count, inner), dtype=x.dtype, device=x.device)
    _expert_product(inward, x, order, starts, up, up_scale, group_size, up_blocks, inside, top_k, activation)
    of_choices = torch.empty((count, size), dtype=x.dtype, device=x.device)
    _expert_product(outward, inside, order, starts, down, down_scale, group_size, down_blocks, of_choices, 1, None)
    launcher.run(
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
) -> None:
    """Write activation(x W^T) of every choice to its row of `out`; choice c reads row c // divisor of `x`."""
    (count, out_size), in_size, experts = out.shape, x.shape[1], len(weight)
    group = in_size if group_size is None or weight_scale is None else group_size
    weights, block = of_one_format(blocks)
    launcher.run(
        expert_product,
        (num_tiles(count, experts, launch.blocks["ROWS"]), cdiv(out_size, launch.blocks["OUTPUTS"])),
        launch,
        x=x,
        order=order,
        starts=starts,
        weight=weight,
        weight_scale=weight if weight_scale is None else weight_scale,
        out=out,
        choices=count,
        experts=experts,
        in_size=in_size,
        out_size=out_size,
        group_size=group,
        groups=int8.num_groups(in_size, group),
        x_row=x.stride(0),
        weight_row=weight.stride(1),
        DIVISOR=divisor,
        ACTIVATION=activation or "none",
        WEIGHTS=weights if weight_scale is None else "int8",
        BLOCK=block,
    )
