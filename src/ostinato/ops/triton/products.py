"""Matmul of rows of tokens with rows of weights, shared by `linear` and `moe`.

Weights are plain, int8 with a scale for each group, or in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.blocks import int4_head, place_of, q8_0_head
from ostinato.ops.triton.launcher import dot_operand


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
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute x W^T, [ROWS, OUTPUTS] float32.

    Row i of the tokens begins `row[i]` elements after `x`. `weight` and `scales` are those of the first output; the
    weights of each next output begin `weight_row` elements later. `WEIGHTS` is their format: "plain"; "int8", with
    `groups` scales per output, for `group_size` inputs each (the last group may have fewer); or a format of blocks of
    `BLOCK` inputs (`blocks.py`). `BLOCK` is 0 for the first two.
    """
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    output = tl.arange(0, OUTPUTS)
    if BLOCK > 0:
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
    """Add the matmul of the inputs from `previous_checkpoint` on to `total`: `INPUTS` of them, or those before `end`."""
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
