"""`linear` on a GPU, and the matmul and the decoding of weights that it shares with `moe`.

`linear` is a matmul by cuBLAS or Triton, then one kernel for the steps after it. Weights are plain, int8 with a scale
for each group, or in blocks; Triton multiplies int8 and int4 weights, which it reads in their stored format.
`ops/quant/dequantize.py` defines the formats: `int4_g32`, `int4_g64` and `int4_g128`, which kernels know as "int4" with
a block size, and those of GGUF files in `PIECES` and "Q8_0".

A block of a GGUF file is read in pieces of 16 or 32 inputs with one scale, whose integers lie in neighbouring bytes, so
nothing is shuffled. The integers are exact in every dtype. They are multiplied with the tokens, and the sum is scaled;
a minimum is multiplied with the sum of the tokens' piece. So no weight is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ostinato.ops.launch_tables import matmul as launches
from ostinato.ops.launch_tables.launch import Launch, cdiv
from ostinato.ops.operations import GATED, PIECES, TRITON_BLOCKS
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks
from ostinato.ops.triton import common
from ostinato.ops.triton.common import activate, dot_operand, to_dtype


def read_as(name: str) -> tuple[str, int]:
    """Return the kernels' name of a format, and the elements of its blocks."""
    assert name in TRITON_BLOCKS, f"the plan chooses the reference for {name}"
    kind = BLOCK_FORMATS[name]
    return "int4" if kind.family == "int4" else name, kind.elements


def of_one_format(blocks: Blocks | None) -> tuple[str, int]:
    """Return `read_as` of rows that have one format; "plain" and 0 for rows that are not in blocks."""
    if blocks is None:
        return "plain", 0
    ((name, _),) = blocks
    return read_as(name)


@triton.jit
def place_of(index, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offset of a row's block number `index` in bytes."""
    if WEIGHTS == "int4":
        offset = index * (4 + BLOCK // 2)
    elif WEIGHTS == "Q4_0":
        offset = index * 18
    elif WEIGHTS == "MXFP4":
        offset = index * 17
    elif WEIGHTS == "Q4_K":
        offset = index * 144
    elif WEIGHTS == "Q5_K":
        offset = index * 176
    elif WEIGHTS == "Q6_K":
        offset = index * 210
    else:
        offset = index * (2 + BLOCK)
    return offset


@triton.jit
def byte_at(place, is_there):
    """Load bytes, int32."""
    return tl.load(place, mask=is_there, other=0).to(tl.int32)


@triton.jit
def half_at(place, is_there):
    """Load float16 numbers, which may begin at any byte, as float32."""
    bits = byte_at(place, is_there) | byte_at(place + 1, is_there) << 8
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scales_at(block, piece, is_there, WEIGHTS: tl.constexpr):
    """Return the scales and minima, float32, of the piece number `piece` of the blocks that `block` points at."""
    minimum = tl.zeros(block.shape, tl.float32)
    if WEIGHTS == "Q4_K" or WEIGHTS == "Q5_K":
        # Six bits each: of the first four parts in bytes of their own, of the others in halves and upper bits.
        place, late = block + 4 + piece % 4, piece // 4
        first, second = byte_at(place, is_there), byte_at(place + 4, is_there)
        third = byte_at(place + 8, is_there)
        step = (first & 63) * (1 - late) + late * (third & 15 | (first >> 6) << 4)
        least = (second & 63) * (1 - late) + late * (third >> 4 | (second >> 6) << 4)
        scale = half_at(block, is_there) * step.to(tl.float32)
        minimum = half_at(block + 2, is_there) * least.to(tl.float32)
    elif WEIGHTS == "Q6_K":
        step = tl.load(block + 192 + piece, mask=is_there, other=0).to(tl.int8, bitcast=True)
        scale = half_at(block + 208, is_there) * step.to(tl.float32)
    elif WEIGHTS == "MXFP4":
        # Half of a power of two, as the numbers are doubled. The smallest two are denormal.
        exponent = byte_at(block, is_there)
        small = 0x00200000 << tl.minimum(exponent, 1)
        scale = tl.where(exponent < 2, small, (exponent - 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = half_at(block, is_there)
    return scale, minimum


@triton.jit
def integers_at(block, piece, element, is_there, WEIGHTS: tl.constexpr):
    """Load the integers number `element`, int16, of a piece of the blocks that `block` points at."""
    if WEIGHTS == "Q4_K":
        whole = byte_at(block + 16 + piece // 2 * 32 + element, is_there) >> piece % 2 * 4 & 15
    elif WEIGHTS == "Q5_K":
        whole = byte_at(block + 48 + piece // 2 * 32 + element, is_there) >> piece % 2 * 4 & 15
        whole |= (byte_at(block + 16 + element, is_there) >> piece & 1) << 4
    elif WEIGHTS == "Q6_K":
        # A half of a block has four parts of 32 in the lower and upper halves of 64 bytes, and two bits of each more in
        # 32 bytes.
        half, part, element = piece // 8, piece % 8 // 2, piece % 2 * 16 + element
        low = byte_at(block + half * 64 + part % 2 * 32 + element, is_there) >> part // 2 * 4 & 15
        whole = (low | (byte_at(block + 128 + half * 32 + element, is_there) >> part * 2 & 3) << 4) - 32
    elif WEIGHTS == "MXFP4":
        code = byte_at(block + 1 + element, is_there) >> piece * 4 & 15
        exponent, bit = code >> 1 & 3, code & 1
        doubled = tl.where(exponent == 0, bit, (2 + bit) << tl.maximum(exponent - 1, 0))
        whole = tl.where(code > 7, -doubled, doubled)
    else:
        whole = (byte_at(block + 2 + element, is_there) >> piece * 4 & 15) - 8
    return whole.to(tl.int16)


@triton.jit
def int4_head(block, is_there):
    """Load the scales, float32, and zero points, int16, of the int4 blocks that `block` points at."""
    bits = tl.load(block.to(tl.pointer_type(tl.int32)), mask=is_there, other=0)
    return (bits & -256).to(tl.float32, bitcast=True), (bits & 255).to(tl.int16)


@triton.jit
def q8_0_head(block, is_there):
    """Load the scales, float32, of the blocks of Q8_0 that `block` points at."""
    return half_at(block, is_there)


@triton.jit
def numbers_at(block, element, is_there, WEIGHTS: tl.constexpr, PIECE: tl.constexpr):
    """Load the weights number `element`, float32, of the blocks that `block` points at."""
    minimum = 0.0
    if PIECE > 0:
        scale, minimum = scales_at(block, element // PIECE, is_there, WEIGHTS)
        whole = integers_at(block, element // PIECE, element % PIECE, is_there, WEIGHTS)
    elif WEIGHTS == "int4":
        scale, zero = int4_head(block, is_there)
        # The first 16 of 32 elements are the lower halves of 16 bytes.
        packed = tl.load(block + 4 + element // 32 * 16 + element % 16, mask=is_there, other=0)
        whole = ((packed.to(tl.int32) >> element % 32 // 16 * 4) & 15) - zero
    else:
        scale = q8_0_head(block, is_there)
        whole = tl.load(block + 2 + element, mask=is_there, other=0).to(tl.int8, bitcast=True)
    return scale * whole.to(tl.float32) - minimum


@triton.jit
def product(
    x,
    row,
    is_row,
    weight,
    scales,
    weight_row,
    is_output,
    in_size,
    group_size,
    groups,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute x W^T, [ROWS, OUTPUTS] float32.

    Row i of the tokens begins `row[i]` elements after `x`. `weight` and `scales` are those of the first output; the
    weights of each next output begin `weight_row` elements later. `WEIGHTS` is their format: "plain"; "int8", with
    `groups` scales per output, for `group_size` inputs each (the last group may have fewer); or a format of blocks of
    `BLOCK` inputs (`ops/quant/block_formats.py`), which are read in pieces of `PIECE` inputs if that is not 0. `BLOCK`
    is 0 for the first two.
    """
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    output = tl.arange(0, OUTPUTS)
    if PIECE > 0:
        element = tl.arange(0, PIECE)
        for base in range(0, in_size, PIECE):
            block = weight + output * weight_row + place_of(base // BLOCK, WEIGHTS, BLOCK)
            piece = base % BLOCK // PIECE
            scale, minimum = scales_at(block, piece, is_output, WEIGHTS)
            whole = integers_at(block[None, :], piece, element[:, None], is_output[None, :], WEIGHTS)
            rows = tl.load(x + row[:, None] + (base + element)[None, :], mask=is_row[:, None], other=0.0)
            rows = dot_operand(rows)
            total += tl.dot(rows, whole.to(rows.dtype), input_precision="tf32x3") * scale[None, :]
            if WEIGHTS == "Q4_K" or WEIGHTS == "Q5_K":
                total -= tl.sum(rows.to(tl.float32), 1)[:, None] * minimum[None, :]
    elif BLOCK > 0:
        for base in range(0, in_size, BLOCK):
            block = weight + output * weight_row + place_of(base // BLOCK, WEIGHTS, BLOCK)
            total += _of_block(x + base, row, is_row, block, is_output, WEIGHTS, BLOCK, ROWS, OUTPUTS, INPUTS)
    elif WEIGHTS == "int8":
        for group in range(groups):
            begin = group * group_size
            end = tl.minimum(begin + group_size, in_size)
            part = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for base in range(begin, end, INPUTS):
                part = _add_inputs(part, x, row, is_row, weight, output * weight_row, is_output, base, end, INPUTS)
            scale = tl.load(scales + output * groups + group, mask=is_output, other=0.0)
            total += part * scale[None, :]
    else:
        for base in range(0, in_size, INPUTS):
            total = _add_inputs(total, x, row, is_row, weight, output * weight_row, is_output, base, in_size, INPUTS)
    return total


@triton.jit
def _add_inputs(total, x, row, is_row, weight, column, is_output, base, end, INPUTS: tl.constexpr):
    """Add the matmul of the inputs from `base` on to `total`: `INPUTS` of them, or those before `end`."""
    element = base + tl.arange(0, INPUTS)
    rows = tl.load(x + row[:, None] + element[None, :], mask=is_row[:, None] & (element < end)[None, :], other=0.0)
    columns = tl.load(
        weight + column[None, :] + element[:, None], mask=is_output[None, :] & (element < end)[:, None], other=0
    )
    rows = dot_operand(rows)
    # Integers up to 127 are exact in every dtype.
    return tl.dot(rows, columns.to(rows.dtype), total, input_precision="tf32x3")


@triton.jit
def _of_block(
    x,
    row,
    is_row,
    block,
    is_output,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply tokens with one block of each output, which `block` points at."""
    part = tl.zeros([ROWS, OUTPUTS], tl.float32)
    # It is unrolled, so that the loop around it is the innermost one, whose loads are pipelined.
    if WEIGHTS == "int4":
        # A byte's halves are weights of inputs 16 apart. So the lower halves of many bytes are one operand, the upper
        # ones another, and nothing is shuffled.
        scale, zero = int4_head(block, is_output)
        byte = tl.arange(0, INPUTS // 2)
        element = byte // 16 * 32 + byte % 16
        for first in tl.static_range(0, BLOCK, INPUTS):
            packed = tl.load(block[None, :] + (4 + first // 2 + byte)[:, None], mask=is_output[None, :], other=0)
            for half in tl.static_range(2):
                of_half = x + row[:, None] + (first + 16 * half + element)[None, :]
                rows = dot_operand(tl.load(of_half, mask=is_row[:, None], other=0.0))
                # Integers less an 8-bit zero point are exact in every dtype.
                whole = ((packed >> 4 * half) & 15).to(tl.int16) - zero[None, :]
                part = tl.dot(rows, whole.to(rows.dtype), part, input_precision="tf32x3")
    else:
        scale = q8_0_head(block, is_output)
        element = tl.arange(0, INPUTS)
        for first in tl.static_range(0, BLOCK, INPUTS):
            rows = dot_operand(tl.load(x + row[:, None] + (first + element)[None, :], mask=is_row[:, None], other=0.0))
            whole = tl.load(block[None, :] + (2 + first + element)[:, None], mask=is_output[None, :], other=0)
            whole = whole.to(tl.int8, bitcast=True)
            part = tl.dot(rows, whole.to(rows.dtype), part, input_precision="tf32x3")
    return part * scale[None, :]


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
    PIECE: tl.constexpr,
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
        PIECE,
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
    int8_activations: bool = False,
) -> torch.Tensor:
    """Compute `ops.linear`; its reference documents arguments and result."""
    assert not int8_activations, "the plan quantises activations on CPUs alone"
    if x.dim() == 3:
        return torch.bmm(x.transpose(0, 1), weight.unflatten(0, (x.shape[1], -1)).mT).transpose(0, 1).contiguous()
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
    common.run(
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
    return launches.linear_launches(
        tokens=x.shape[0], element_bytes=x.element_size(), capability=common.capability(x), **how
    )


def _product_of_blocks(
    x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x W^T + bias in the dtype of `x`, with a launch for the rows of each format."""
    (tokens, in_size), flat = x.shape, weight.view(-1)
    y = torch.empty((tokens, sum(rows for _, rows in blocks)), dtype=x.dtype, device=x.device)
    place = first = 0
    for name, rows in blocks:
        row_bytes = BLOCK_FORMATS[name].row_bytes(in_size)
        assert place % 4 == 0 or read_as(name)[0] != "int4", "what begins a block of int4 is read as 32 bits"
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
    (launch,) = _launches(x, is_quantized=True, group_size=group_size, in_pieces=weights in PIECES)
    group = in_size if group_size is None else group_size
    common.run(
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
        groups=quantize.num_groups(in_size, group),
        x_token=x.stride(0),
        weight_row=weight.stride(0),
        out_token=out.stride(0),
        WEIGHTS=weights,
        BLOCK=group if weight_scale is None else 0,
        PIECE=PIECES.get(weights, 0),
        HAS_BIAS=bias is not None,
    )
