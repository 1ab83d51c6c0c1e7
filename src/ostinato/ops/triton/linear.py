"""linear on a GPU: a matmul by cuBLAS or Triton, then one kernel for the steps after it.

Triton multiplies int8 and int4 weights, which it reads in their stored format.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ostinato.ops import int8
from ostinato.ops.blocks.formats import BLOCK_FORMATS, Blocks
from ostinato.ops.launches import products as launches
from ostinato.ops.launches.table import Launch, cdiv
from ostinato.ops.results import GATED
from ostinato.ops.triton import launcher
from ostinato.ops.triton.activations import activate
from ostinato.ops.triton.blocks import read_as
from ostinato.ops.triton.launcher import to_dtype
from ostinato.ops.triton.products import product


@triton.jit(do_not_specialize=["tokens"])
def quantized_product(
    x,
    weight,
    weight_scale,
    bias,
    out,
    tokens,
    in_size,
    out_size,
    group_size,
    groups,
    x_token,
    weight_row,
    out_token,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute a tile of x W^T + bias."""
    first_output = tl.program_id(1).to(tl.int64) * OUTPUTS
    first_token = tl.program_id(0).to(tl.int64) * ROWS
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token, is_output = token < tokens, output < out_size
    total = product(
        x + first_token * x_token,
        tl.arange(0, ROWS) * x_token,
        is_token,
        weight + first_output * weight_row,
        weight_scale + first_output * groups,
        weight_row,
        is_output,
        in_size,
        group_size,
        groups,
        WEIGHTS,
        BLOCK,
        ROWS,
        OUTPUTS,
        INPUTS,
    )
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    where = out + token.to(tl.int64)[:, None] * out_token + output[None, :]
    tl.store(where, to_dtype(total, out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@triton.jit
def finish(
    y,
    scale,
    residual,
    out,
    size,
    residual_token,
    ACTIVATION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute activation(y * scale) + residual of a part of one token, in float32.

    With gates, `y` has twice `size` outputs, the gates first.
    """
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = output < size
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        gate = tl.load(y + token * 2 * size + output, mask=is_own, other=0.0).to(tl.float32)
        value = tl.load(y + token * 2 * size + size + output, mask=is_own, other=0.0).to(tl.float32)
        if HAS_SCALE:
            gate *= tl.load(scale + output, mask=is_own, other=0.0)
            value *= tl.load(scale + size + output, mask=is_own, other=0.0)
        value *= activate(gate, ACTIVATION)
    else:
        value = tl.load(y + token * size + output, mask=is_own, other=0.0).to(tl.float32)
        if HAS_SCALE:
            value *= tl.load(scale + output, mask=is_own, other=0.0)
        value = activate(value, ACTIVATION)
    if HAS_RESIDUAL:
        value += tl.load(residual + token * residual_token + output, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out + token * size + output, to_dtype(value, out.dtype.element_ty), mask=is_own)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    blocks: Blocks | None = None,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.linear`; its reference documents arguments and result."""
    out_dtype = x.dtype if out_dtype is None else out_dtype
    is_finished = not (scale is None and activation is None and residual is None and out_dtype == x.dtype)
    if order is not None:
        x = x.index_select(1, order)
    if blocks is not None:
        y = _product_of_blocks(x, weight, blocks, bias)
    elif weight_scale is not None:
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        _product(x, weight, bias, y, "int8", group_size, weight_scale)
    else:
        y = F.linear(x, weight, bias)
    if not is_finished:
        return y
    tokens, outputs = y.shape
    size = outputs // 2 if activation in GATED else outputs
    out = torch.empty((tokens, size), dtype=out_dtype, device=y.device)
    (launch,) = _launches(x, is_finished=True)
    launcher.run(
        finish,
        (tokens, cdiv(size, launch.blocks["BLOCK"])),
        launch,
        y=y,
        scale=scale,
        residual=residual,
        out=out,
        size=size,
        residual_token=0 if residual is None else residual.stride(0),
        ACTIVATION=activation or "none",
        HAS_SCALE=scale is not None,
        HAS_RESIDUAL=residual is not None,
    )
    return out


def _launches(x: torch.Tensor, **how: Any) -> tuple[Launch, ...]:
    return launches.linear_launches(tokens=x.shape[0], element_bytes=x.element_size(), capability=launcher.capability(x), **how)


def _product_of_blocks(
    x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x W^T + bias in the dtype of `x`, with a launch for the rows of each format."""
    (tokens, in_size), flat = x.shape, weight.view(-1)
    y = torch.empty((tokens, sum(rows for _, rows in blocks)), dtype=x.dtype, device=x.device)
    place = first = 0
    for name, rows in blocks:
        row_bytes = BLOCK_FORMATS[name].row_bytes(in_size)
        assert name == "Q8_0" or place % 4 == 0, "what begins a block of int4 is read as 32 bits"
        part = flat[place : place + rows * row_bytes].view(rows, row_bytes)
        end = first + rows
        _product(x, part, None if bias is None else bias[first:end], y[:, first:end], *read_as(name))
        place, first = place + rows * row_bytes, end
    return y


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    weights: str,
    group_size: int | None,
    weight_scale: torch.Tensor | None = None,
) -> None:
    """Write x W^T + bias into `out`, which may be some columns of a matrix.

    `weights` is the kernel's name of the format: "int8" with a `weight_scale`, or a format in blocks of `group_size`
    inputs.
    """
    (tokens, in_size), out_size = x.shape, weight.shape[0]
    (launch,) = _launches(x, is_quantized=True, group_size=group_size)
    group = in_size if group_size is None else group_size
    launcher.run(
        quantized_product,
        (cdiv(tokens, launch.blocks["ROWS"]), cdiv(out_size, launch.blocks["OUTPUTS"])),
        launch,
        x=x,
        weight=weight,
        weight_scale=weight if weight_scale is None else weight_scale,
        bias=bias,
        out=out,
        tokens=tokens,
        in_size=in_size,
        out_size=out_size,
        group_size=group,
        groups=int8.num_groups(in_size, group),
        x_token=x.stride(0),
        weight_row=weight.stride(0),
        out_token=out.stride(0),
        WEIGHTS=weights,
        BLOCK=group if weight_scale is None else 0,
        HAS_BIAS=bias is not None,
    )
