"""Products of rows of tokens with rows of weights, plain or int8 with a scale for each group: what `linear` and `moe`
share."""

from __future__ import annotations

import triton
import triton.language as tl

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
    QUANTIZED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """x W^T, [ROWS, OUTPUTS] float32.

    Row i of the tokens begins `row[i]` elements behind `x`. `weight` and `scales` are those of the first output; the
    next one's weights are `weight_row` behind. An output has `groups` scales, for `group_size` inputs each; the last
    group may have fewer.
    """
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    output = tl.arange(0, OUTPUTS)
    if QUANTIZED:
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
    """`total` with the product of the inputs from `base` on, `INPUTS` of them or those before `end`."""
    element = base + tl.arange(0, INPUTS)
    rows = tl.load(x + row[:, None] + element[None, :], mask=is_row[:, None] & (element < end)[None, :], other=0.0)
    columns = tl.load(
        weight + column[None, :] + element[:, None], mask=is_output[None, :] & (element < end)[:, None], other=0
    )
    rows = dot_operand(rows)
    # Whole numbers up to 127 are exact in every dtype.
    return tl.dot(rows, columns.to(rows.dtype), total, input_precision="tf32x3")
