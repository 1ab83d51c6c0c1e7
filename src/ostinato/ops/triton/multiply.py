"""multiply: a program takes a part of one token's result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


@triton.jit
def multiply_kernel(first, second, out, size, stride_first, stride_second, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    left = tl.load(first + token * stride_first + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(second + token * stride_second + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, to_dtype(left * right, out.dtype.element_ty), mask=inside)


def multiply(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `ops.multiply`; its reference documents arguments and result."""
    tokens, size = first.shape
    out = torch.empty((tokens, size), dtype=first.dtype, device=first.device)
    (launch,) = launches.multiply_launches(size=size, capability=launcher.capability(first))
    launcher.run(
        multiply_kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        first=first,
        second=second,
        out=out,
        size=size,
        stride_first=first.stride(0),
        stride_second=second.stride(0),
    )
    return out
