"""concat: a program copies a part of one token's result from either argument."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher


@triton.jit
def concat_kernel(first, second, out, first_size, second_size, stride_first, stride_second, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    size = first_size + second_size
    is_first = column < first_size
    left = tl.load(first + token * stride_first + column, mask=is_first, other=0.0)
    from_second = second + token * stride_second + column - first_size
    right = tl.load(from_second, mask=(column >= first_size) & (column < size), other=0.0)
    tl.store(out + token * size + column, tl.where(is_first, left, right), mask=column < size)


def concat(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `ops.concat`; its reference documents arguments and result."""
    tokens, first_size = first.shape
    second_size = second.shape[1]
    size = first_size + second_size
    out = torch.empty((tokens, size), dtype=first.dtype, device=first.device)
    (launch,) = launches.concat_launches(size=size, capability=launcher.capability(first))
    launcher.run(
        concat_kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        first=first,
        second=second,
        out=out,
        first_size=first_size,
        second_size=second_size,
        stride_first=first.stride(0),
        stride_second=second.stride(0),
    )
    return out
