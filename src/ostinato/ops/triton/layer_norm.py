"""layer_norm: a program takes whole rows; the variance is summed from differences to the mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(x, weight, bias, out, eps, rows, stride_x, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    values = tl.load(x + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=1) / size
    centred = tl.where(inside, values - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / size + eps)
    by = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    plus = tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)
    normed = centred * scale[:, None] * by[None, :] + plus[None, :]
    tl.store(out + row[:, None] * size + column[None, :], to_dtype(normed, out.dtype.element_ty), mask=inside)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `ops.encoder.layer_norm`; its reference documents arguments and result."""
    rows, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (launch,) = launches.layer_norm_launches(size=size, capability=launcher.capability(x))
    launcher.run(
        layer_norm_kernel,
        (cdiv(rows, launch.blocks["ROWS"]),),
        launch,
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        eps=eps,
        rows=rows,
        stride_x=x.stride(0),
        size=size,
    )
    return out
