"""inject_media: a program takes a part of one token's hidden state; tokens of text cost one load."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


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
    (launch,) = launches.inject_media_launches(size=size, capability=launcher.capability(x))
    launcher.run(
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
