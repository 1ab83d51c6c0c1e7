"""Decoding of weights in blocks, as `ops/blocks/dequantize.py` defines them, in Triton.

The formats are `int4_g32`, `int4_g64` and `int4_g128`, which kernels know as "int4" with a block size, and "Q8_0".
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.blocks.formats import BLOCK_FORMATS, Blocks
from ostinato.ops.facts import TRITON_BLOCKS


def read_as(name: str) -> tuple[str, int]:
    """Return the kernels' name of a format, and the elements of its blocks."""
    assert name in TRITON_BLOCKS, f"the plan chooses the reference for {name}"
    return "int4" if name.startswith("int4") else name, BLOCK_FORMATS[name].elements


def of_one_format(blocks: Blocks | None) -> tuple[str, int]:
    """Return `read_as` of rows that have one format; "plain" and 0 for rows that are not in blocks."""
    if blocks is None:
        return "plain", 0
    ((name, _),) = blocks
    return read_as(name)


@triton.jit
def place_of(index, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offset of a row's block number `index` in bytes."""
    return index * (4 + BLOCK // 2 if WEIGHTS == "int4" else 2 + BLOCK)


@triton.jit
def int4_head(block, is_there):
    """Load the scales, float32, and zero points, int16, of the int4 blocks that `block` points at."""
    bits = tl.load(block.to(tl.pointer_type(tl.int32)), mask=is_there, other=0)
    return (bits & -256).to(tl.float32, bitcast=True), (bits & 255).to(tl.int16)


@triton.jit
def q8_0_head(block, is_there):
    """Load the scales, float32, of the blocks of Q8_0 that `block` points at."""
    return tl.load(block.to(tl.pointer_type(tl.float16)), mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def numbers_at(block, element, is_there, WEIGHTS: tl.constexpr):
    """Load the weights number `element`, float32, of the blocks that `block` points at."""
    if WEIGHTS == "int4":
        scale, zero = int4_head(block, is_there)
        # The first 16 of 32 elements are the lower halves of 16 bytes.
        packed = tl.load(block + 4 + element // 32 * 16 + element % 16, mask=is_there, other=0)
        whole = ((packed.to(tl.int32) >> element % 32 // 16 * 4) & 15) - zero
    else:
        scale = q8_0_head(block, is_there)
        whole = tl.load(block + 2 + element, mask=is_there, other=0).to(tl.int8, bitcast=True)
    return scale * whole.to(tl.float32)
