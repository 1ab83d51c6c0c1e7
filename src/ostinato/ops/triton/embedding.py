"""`embedding`, `weighted_embedding` and `inject_media` on a GPU.

A program copies or adds up a part of one token's vectors, and dequantizes it if it is quantised. In `inject_media` it
takes a part of one token's hidden state; tokens of text cost one load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import pointwise as launches
from ostinato.ops.launch_tables.launch import cdiv
from ostinato.ops.operations import PIECES
from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks
from ostinato.ops.triton import common
from ostinato.ops.triton.common import to_dtype
from ostinato.ops.triton.matmul import numbers_at, of_one_format, place_of


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
    PIECE: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy a part of one token's vector.

    `WEIGHTS` names the format of weights in blocks of `BLOCK` elements (`ops/quant/block_formats.py`); a `BLOCK` of 0
    means no blocks.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    row = tl.load(token_ids + token)
    if BLOCK > 0:
        block = weight + row * weight_row + place_of(column // BLOCK, WEIGHTS, BLOCK)
        vector = numbers_at(block, column % BLOCK, inside, WEIGHTS, PIECE)
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
    out = torch.empty((tokens, size), dtype=out_dtype or weight.dtype, device=weight.device)
    (launch,) = launches.embedding_launches(size=size, capability=common.capability(weight))
    common.run(
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
        PIECE=PIECES.get(weights, 0),
        MULTIPLIES=multiplier != 1.0,
    )
    return out


@triton.jit(do_not_specialize=["row"])
def inject_media_kernel(
    x, media_cells, media, row, media_rows, size, stride_x, ADDS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(media_cells + token)
    if cell > 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < size
        given = tl.load(media + (cell * media_rows + row) * size + column, mask=inside, other=0.0)
        to = x + token * stride_x + column
        if ADDS:
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32) + given.to(tl.float32)
            given = to_dtype(total, x.dtype.element_ty)
        tl.store(to, given, mask=inside)


def inject_media(x: torch.Tensor, media_cells: torch.Tensor, media: torch.Tensor, row: int, add: bool) -> torch.Tensor:
    """Compute `ops.inject_media`; its reference documents arguments and result."""
    tokens, size = x.shape
    (launch,) = launches.inject_media_launches(size=size, capability=common.capability(x))
    common.run(
        inject_media_kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        x=x,
        media_cells=media_cells,
        media=media,
        row=row,
        media_rows=media.shape[1],
        size=size,
        stride_x=x.stride(0),
        ADDS=add,
    )
    return x


@triton.jit
def add_vectors(ids, weights, table, out, hidden, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        vector = tl.load(ids + token * COUNT + i)
        weight = tl.load(weights + token * COUNT + i)
        total += tl.load(table + vector * hidden + element, mask=element < hidden, other=0.0).to(tl.float32) * weight
    tl.store(out + token * hidden + element, to_dtype(total, out.dtype.element_ty), mask=element < hidden)


def weighted_embedding(ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Compute `ops.encoder.weighted_embedding`; its reference documents arguments and result."""
    tokens, count = ids.shape
    hidden = table.shape[1]
    out = torch.empty((tokens, hidden), dtype=table.dtype, device=table.device)
    (launch,) = launches.weighted_embedding_launches(count=count, capability=common.capability(table))
    common.run(
        add_vectors,
        (tokens, cdiv(hidden, launch.blocks["BLOCK"])),
        launch,
        ids=ids.contiguous(),
        weights=weights.contiguous(),
        table=table,
        out=out,
        hidden=hidden,
    )
    return out
