"""embedding: a program copies a part of one token's vector, and dequantizes it if it is quantised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.blocks.formats import BLOCK_FORMATS, Blocks
from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.blocks import numbers_at, of_one_format, place_of
from ostinato.ops.triton.launcher import to_dtype


@triton.jit
def embedding_kernel(
    token_ids,
    weight,
    scale,
    out,
    multiplier,
    size,
    weight_row,
    groups,
    group_size,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy a part of one token's vector.

    `WEIGHTS` names the format of weights in blocks of `BLOCK` elements (`blocks.py`); a `BLOCK` of 0 means no blocks.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    row = tl.load(token_ids + token)
    if BLOCK > 0:
        block = weight + row * weight_row + place_of(column // BLOCK, WEIGHTS, BLOCK)
        vector = numbers_at(block, column % BLOCK, inside, WEIGHTS)
    else:
        vector = tl.load(weight + row * weight_row + column, mask=inside, other=0)
    if scale is not None:
        vector = vector.to(tl.float32) * tl.load(scale + row * groups + column // group_size, mask=inside, other=0.0)
    if MULTIPLIES:
        vector = vector.to(tl.float32) * multiplier
    tl.store(out + token * size + column, to_dtype(vector, out.dtype.element_ty), mask=inside)


def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    multiplier: float,
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Compute `ops.embedding`; its reference documents arguments and result."""
    weights, block = of_one_format(blocks)
    tokens, size = token_ids.shape[0], weight.shape[1]
    if blocks is not None:
        size = size // BLOCK_FORMATS[blocks[0][0]].num_bytes * block
    dtype = weight.dtype if weight_scale is None and blocks is None else out_dtype
    out = torch.empty((tokens, size), dtype=dtype, device=weight.device)
    (launch,) = launches.embedding_launches(size=size, capability=launcher.capability(weight))
    launcher.run(
        embedding_kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        token_ids=token_ids,
        weight=weight,
        scale=weight_scale,
        out=out,
        multiplier=float(multiplier),
        size=size,
        weight_row=weight.stride(0),
        groups=1 if weight_scale is None or group_size is None else weight_scale.shape[1],
        group_size=size if group_size is None else group_size,
        WEIGHTS=weights,
        BLOCK=block,
        MULTIPLIES=multiplier != 1.0,
    )
    return out
