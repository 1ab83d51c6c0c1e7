"""Norms, joins and gated activations on a GPU.

In `add`, `clip`, `concat`, `multiply` and `gated_activation`, a program takes a part of one token's result. In
`rms_norm` and `layer_norm` it takes rows, in `gated_rms_norm` groups of channels. Squares are added in float32; the
variance of `layer_norm` is summed from differences to the mean.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import pointwise as launches
from ostinato.ops.launch_tables.launch import Launch, cdiv
from ostinato.ops.triton import common
from ostinato.ops.triton.common import activate, to_dtype


@triton.jit
def concat_kernel(
    first,
    second,
    out,
    heads,
    first_size,
    second_size,
    stride_first,
    stride_second,
    stride_first_head,
    stride_second_head,
    COLUMNS: tl.constexpr,
):
    """Join a part of one head's vectors; a token without heads is one."""
    row = tl.program_id(1).to(tl.int64)
    token, head = row // heads, row % heads
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    size = first_size + second_size
    is_first = column < first_size
    left = tl.load(first + token * stride_first + head * stride_first_head + column, mask=is_first, other=0.0)
    from_second = second + token * stride_second + head * stride_second_head + column - first_size
    right = tl.load(from_second, mask=(column >= first_size) & (column < size), other=0.0)
    tl.store(out + row * size + column, tl.where(is_first, left, right), mask=column < size)


def concat(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `ops.concat`; its reference documents arguments and result."""
    heads, first_size, second_size = first.shape[1] if first.dim() == 3 else 1, first.shape[-1], second.shape[-1]
    size = first_size + second_size
    out = torch.empty((*first.shape[:-1], size), dtype=first.dtype, device=first.device)
    (launch,) = launches.concat_launches(size=size, capability=common.capability(first))
    common.run(
        concat_kernel,
        # Only the first axis of a grid may be long, as what two parts of a step computed is joined as one vector.
        (cdiv(size, launch.blocks["COLUMNS"]), first.shape[0] * heads),
        launch,
        first=first,
        second=second,
        out=out,
        heads=heads,
        first_size=first_size,
        second_size=second_size,
        stride_first=first.stride(0),
        stride_second=second.stride(0),
        stride_first_head=first.stride(1) if heads > 1 else 0,
        stride_second_head=second.stride(1) if heads > 1 else 0,
    )
    return out


@triton.jit
def gated_activation_kernel(
    x, out, size, stride, alpha, limit, offset, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate = tl.load(x + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + token * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
        y = gate / (1 + tl.exp(-alpha * gate)) * (value + offset)
    else:
        y = activate(gate, ACTIVATION) * value
    tl.store(out + token * size + column, to_dtype(y, out.dtype.element_ty), mask=inside)


def gated_activation(x: torch.Tensor, activation: str, clamp: tuple[float, float, float] | None = None) -> torch.Tensor:
    """Compute `ops.gated_activation`; its reference documents arguments and result."""
    tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    (launch,) = launches.gated_activation_launches(size=size, capability=common.capability(x))
    common.run(
        gated_activation_kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        x=x,
        out=out,
        size=size,
        stride=x.stride(0),
        alpha=None if clamp is None else clamp[0],
        limit=None if clamp is None else clamp[1],
        offset=None if clamp is None else clamp[2],
        ACTIVATION=activation,
    )
    return out


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
    stride_gate_head,
    stride_gate_channel,
    head_size,
    GATE_FIRST: tl.constexpr,
    SHARES_WEIGHT: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    GATES_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise groups of channels; row r is group `r % groups` of token `r // groups`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    token, channel = (row // groups)[:, None], ((row % groups) * size)[:, None] + column[None, :]
    y = tl.load(x + token * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
    of_gate = token * stride_gate + channel
    if GATES_HEADS:
        of_gate = token * stride_gate + channel // head_size * stride_gate_head
        of_gate += channel % head_size * stride_gate_channel
    by = tl.load(gate + of_gate, mask=inside, other=0.0).to(tl.float32)
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
    (launch,) = launches.gated_rms_norm_launches(size=size, capability=common.capability(x))
    common.run(
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
        stride_gate_head=gate.stride(1),
        stride_gate_channel=gate.stride(2) if gate.dim() == 3 else 0,
        head_size=channels // gate.shape[1],
        GATES_HEADS=gate.shape != x.shape,
        GATE_FIRST=weight is None or not norm_before_gate,
        SHARES_WEIGHT=weight is not None and weight.shape[0] != channels,
        IS_SIGMOID=gate_is_sigmoid,
    )
    return out


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
    (launch,) = launches.layer_norm_launches(size=size, capability=common.capability(x))
    common.run(
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


@triton.jit
def add_kernel(first, second, out, size, stride_first, stride_second, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    left = tl.load(first + token * stride_first + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(second + token * stride_second + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, to_dtype(left + right, out.dtype.element_ty), mask=inside)


def add(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `ops.add`; its reference documents arguments and result."""
    (launch,) = launches.add_launches(size=first.shape[1], capability=common.capability(first))
    return _combined(add_kernel, launch, first, second)


@triton.jit
def clip_kernel(x, bounds, out, size, stride_x, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    least, most = tl.load(bounds), tl.load(bounds + 1)
    value = tl.load(x + token * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value < least, least, value)
    value = tl.where(value > most, most, value)
    tl.store(out + token * size + column, to_dtype(value, out.dtype.element_ty), mask=inside)


def clip(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Compute `ops.clip`; its reference documents arguments and result."""
    tokens, size = x.shape
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    (launch,) = launches.clip_launches(size=size, capability=common.capability(x))
    grid = (tokens, cdiv(size, launch.blocks["COLUMNS"]))
    common.run(clip_kernel, grid, launch, x=x, bounds=bounds, out=out, size=size, stride_x=x.stride(0))
    return out


@triton.jit
def multiply_kernel(first, second, out, size, stride_first, stride_second, IS_ONE: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    left = tl.load(first + token * stride_first + column, mask=inside, other=0.0).to(tl.float32)
    of_second = column * 0 if IS_ONE else column
    right = tl.load(second + token * stride_second + of_second, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, to_dtype(left * right, out.dtype.element_ty), mask=inside)


def multiply(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute `ops.multiply`; its reference documents arguments and result."""
    (launch,) = launches.multiply_launches(size=first.shape[1], capability=common.capability(first))
    return _combined(multiply_kernel, launch, first, second, IS_ONE=second.shape[1] == 1)


def _combined(
    kernel: Any, launch: Launch, first: torch.Tensor, second: torch.Tensor, **constants: bool
) -> torch.Tensor:
    """Return what a kernel makes of two arrays element by element; one row of the second may be for all tokens."""
    tokens, size = first.shape
    out = torch.empty((tokens, size), dtype=first.dtype, device=first.device)
    common.run(
        kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        first=first,
        second=second,
        out=out,
        size=size,
        stride_first=first.stride(0),
        stride_second=second.stride(0) if second.shape[0] > 1 else 0,
        **constants,
    )
    return out


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
    values = tl.load(x + begin[:, None] + column[None, :], mask=inside, other=0.0)
    values = to_dtype(values, weight.dtype.element_ty).to(tl.float32)
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
    (launch,) = launches.rms_norm_launches(size=size, capability=common.capability(x))
    common.run(
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
