"""gated_rms_norm: a program takes whole groups of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


@triton.jit(do_not_specialize=["rows"])
def gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    eps,
    rows,
    groups,
    size,
    stride_x,
    stride_gate,
    GATE_FIRST: tl.constexpr,
    SHARES_WEIGHT: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise groups of channels; row r is group `r % groups` of token `r // groups`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    token, channel = (row // groups)[:, None], ((row % groups) * size)[:, None] + column[None, :]
    y = tl.load(x + token * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(gate + token * stride_gate + channel, mask=inside, other=0.0).to(tl.float32)
    let_through = 1.0 / (1.0 + tl.exp(-by))
    if not IS_SIGMOID:
        let_through = by * let_through
    if GATE_FIRST:
        y = y * let_through
    if weight is not None:
        scale = tl.rsqrt(tl.sum(y * y, axis=1) / size + eps)
        of_weight = column[None, :] + tl.zeros_like(channel) if SHARES_WEIGHT else channel
        y = y * scale[:, None] * tl.load(weight + of_weight, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        y = y * let_through
    tl.store(out + token * groups * size + channel, to_dtype(y, out.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool = False,
    gate_is_sigmoid: bool = False,
) -> torch.Tensor:
    """Compute `ops.gated_rms_norm`; its reference documents arguments and result."""
    assert weight is None or group_size is not None, "a norm averages over groups of channels"
    tokens, channels = x.shape
    size = channels if group_size is None else group_size
    groups = channels // size
    rows = tokens * groups
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    (launch,) = launches.gated_rms_norm_launches(size=size, capability=launcher.capability(x))
    launcher.run(
        gated_rms_norm_kernel,
        (cdiv(rows, launch.blocks["ROWS"]),),
        launch,
        x=x,
        gate=gate,
        weight=weight,
        out=out,
        eps=eps,
        rows=rows,
        groups=groups,
        size=size,
        stride_x=x.stride(0),
        stride_gate=gate.stride(0),
        GATE_FIRST=weight is None or not norm_before_gate,
        SHARES_WEIGHT=weight is not None and weight.shape[0] != channels,
        IS_SIGMOID=gate_is_sigmoid,
    )
    return out
