"""Launches of `linear_launches`, `route_launches` and `moe_launches`."""

from __future__ import annotations

from dataclasses import replace

from ostinato.ops.launch_tables.launch import SPAN, Launch, power_of_two

BLOCK = 1024
"""Elements of a program that passes over outputs, or choices that it reads at a time."""

FEW = 16
"""Largest number of tokens of one weight's tile for which a matmul is bound by reading weights."""

# Rows of tokens, outputs, inputs, warps, stages and registers of a thread, by small m or not, and by bytes of an
# element. float32 is multiplied in three parts, which takes registers. Four blocks have 128 of them each, two 255.
TILES = {
    (True, 2): (16, 32, 128, 4, 3, 128),
    (True, 4): (16, 16, 32, 4, 1, 168),
    (False, 2): (64, 64, 64, 4, 3, 255),
    (False, 4): (32, 32, 32, 4, 1, 255),
}


def linear_launches(
    *,
    tokens: int,
    element_bytes: int,
    capability: int,
    is_quantized: bool = False,
    group_size: int | None = None,
    in_pieces: bool = False,
    is_finished: bool = False,
) -> tuple[Launch, ...]:
    """Return the launches of `linear_launches`.

    `is_quantized`: int8 weights, with a scale per row or per group of `group_size` inputs, or weights in blocks of
    `group_size` inputs, which are read in pieces if `in_pieces`; cuBLAS computes the matmul of others. `is_finished`:
    something follows the matmul.
    """
    launches = (_tile("quantized_product", tokens, element_bytes, group_size, in_pieces),) if is_quantized else ()
    finish = (Launch("finish", {"BLOCK": BLOCK}),) if is_finished else ()
    return launches + finish


def route_launches(
    *, num_experts: int, top_k: int, element_bytes: int, capability: int, num_groups: int = 1, top_groups: int = 1
) -> tuple[Launch, ...]:
    """Return the launches of `route`, in which a warp selects the experts of one token."""
    tile = _tile("score_experts", 1, element_bytes)
    choice = {
        "TOP_K": top_k,
        "TOP_K_WIDTH": power_of_two(top_k),
        "NUM_GROUPS": num_groups,
        "GROUPS_WIDTH": power_of_two(num_groups),
        "TOP_GROUPS": top_groups,
        "WIDTH": power_of_two(num_experts),
    }
    return (
        Launch("score_experts", {**tile.blocks, "OUTPUTS": 16}, tile.num_warps, tile.num_stages, tile.registers),
        Launch("choose_experts", choice, num_warps=1),
    )


def moe_launches(
    *,
    tokens: int,
    num_experts: int,
    top_k: int,
    element_bytes: int,
    capability: int,
    group_size: int | None = None,
    in_blocks: bool = False,
    in_pieces: bool = False,
) -> tuple[Launch, ...]:
    """Return the launches of `moe`; its two matmuls, inward and outward, have the same launch.

    `group_size` is that of int8 weights with scales for groups, or that of weights in blocks if `in_blocks`,
    which are read in pieces if `in_pieces`.
    """
    in_tile = tokens * top_k // num_experts
    product = _tile("expert_product", in_tile, element_bytes, group_size, in_pieces, {"SPAN": SPAN})
    if in_blocks and capability != 90:
        # Gates and values of 64 outputs, with both halves of their weights, take more registers than there are. On 9.0
        # a matmul reads its weights from shared memory.
        outputs = min(product.blocks["OUTPUTS"], 32)
        product = replace(product, blocks={**product.blocks, "OUTPUTS": outputs})
    return (
        Launch("sort_choices", {"TOP_K": top_k, "BLOCK": BLOCK}),
        product,
        product,
        Launch("add_choices", {"TOP_K": top_k, "BLOCK": BLOCK}),
    )


def _tile(
    kernel: str,
    tokens: int,
    element_bytes: int,
    group_size: int | None = None,
    in_pieces: bool = False,
    others: dict[str, int] | None = None,
) -> Launch:
    """Return the launch of a matmul in which a weight meets `tokens` tokens.

    Inputs that are taken at a time have one scale. Those of a piece are made of several loads, whose addresses take
    registers: then a tile has at most 32 outputs.
    """
    rows, outputs, inputs, warps, stages, registers = TILES[tokens <= FEW, element_bytes]
    outputs = min(outputs, 32) if in_pieces else outputs
    if group_size is not None:
        inputs = power_of_two(group_size, least=16, most=inputs)
    blocks = {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, **(others or {})}
    return Launch(kernel, blocks, warps, stages, registers)
