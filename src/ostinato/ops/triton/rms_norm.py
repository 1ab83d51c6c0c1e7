"""rms_norm: a program takes whole rows, and adds their squares in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    eps,
    offset,
    rows,
    inner,
    stride_outer,
    stride_inner,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise rows; row r of `x` begins at `(r // inner) * stride_outer + (r % inner) * stride_inner`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    begin = (row // inner) * stride_outer + (row % inner) * stride_inner
    values = tl.load(x + begin[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / size + eps)
    by = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
    normed = values * scale[:, None] * by[None, :]
    if residual is not None:
        normed += tl.load(residual + row[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * size + column[None, :], to_dtype(normed, out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `ops.rms_norm`; its reference documents arguments and result."""
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.reshape(-1, 1, size).contiguous()
    outer, inner = x.shape[:2]
    rows = outer * inner
    (launch,) = launches.rms_norm_launches(size=size, capability=launcher.capability(x))
    launcher.run(
        rms_norm_kernel,
        (cdiv(rows, launch.blocks["ROWS"]),),
        launch,
        x=x,
        weight=weight,
        residual=None if residual is None else residual.contiguous(),
        out=out,
        eps=eps,
        offset=offset,
        rows=rows,
        inner=inner,
        stride_outer=x.stride(0),
        stride_inner=x.stride(1),
        size=size,
    )
    return out
