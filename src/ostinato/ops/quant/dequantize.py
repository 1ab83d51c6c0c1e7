"""Values of weights in blocks (`block_formats.py`): the definition of each format.

The formats of GGUF are ggml's (github.com/ggml-org/ggml, ggml-quants). A block has a scale in float16, in some formats
also a minimum, and integers of few bits. Blocks of 256 weights (`_K`, `IQ4_XS`) have scales of 6 or 8 bits for their
parts of 16 or 32, and a scale for these scales.

`int4_g32`, `int4_g64` and `int4_g128` are our own: 4-bit integers q from 0 to 15 mean scale * (q - zero), and the
difference is exact. A block begins with 32 bits, the lowest byte first: the scale as float32, with the zero point in
its lowest 8 bits. A scale of 16 bits, bfloat16 or float16, has only zeros there, so that nothing of a checkpoint's
scale is lost. After them each part of 32 elements has 16 bytes: its first 16 elements are the lower halves, the others
the upper ones.

`fp8_g32`, `fp8_g64` and `fp8_g128` are our own too: a scale in float32, and float8_e4m3 numbers unchanged (Micikevicius
et al., FP8 formats for deep learning, 2022: a sign, four bits of exponent less 7, three of mantissa; no infinity). If a
block contains a NaN, its scale is NaN, and so is the whole block: kernels decode no NaN among the numbers.

Blocks are arrays of numpy, such as those of a file, or of torch, such as those of a model that references compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from ostinato.ops.arrays import AnyArray, bits_as, converted, library, like
from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks
from ostinato.ops.sizes import DEQUANT_SLAB, INT4_ZERO_BITS
from ostinato.ops.step_inputs import Array

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 4-bit codes of IQ4_NL and IQ4_XS."""

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 4-bit codes of MXFP4: a sign, two bits of exponent, one of mantissa."""


def dequantize(name: str, blocks: AnyArray) -> AnyArray:
    """Return the weights of `blocks` [..., bytes of a row] uint8 in format `name`, [..., weights] float32."""
    *outer, row = blocks.shape
    kind = BLOCK_FORMATS[name]
    each: Any = blocks.reshape(-1, kind.num_bytes)
    values = _DEQUANTIZE[name](each).reshape(*outer, row // kind.num_bytes * kind.elements)
    return cast(AnyArray, values)


def slabs(weight: Array, blocks: Blocks, in_size: int) -> Iterator[Array]:
    """Yield the rows of a matrix, uint8 of any shape, in slabs of float32 [rows, in]."""
    flat, begin = weight.reshape(-1), 0
    for name, rows in blocks:
        row_bytes = BLOCK_FORMATS[name].row_bytes(in_size)
        part = flat[begin : begin + rows * row_bytes].reshape(rows, row_bytes)
        begin += rows * row_bytes
        step = max(1, DEQUANT_SLAB // in_size)
        for row in range(0, rows, step):
            yield dequantize(name, part[row : row + step])


def pack_int4(whole: AnyArray, scale: AnyArray, zero: AnyArray) -> AnyArray:
    """Pack 4-bit integers with their scales and zero points into blocks.

    `whole` [rows, in] are integers from 0 to 15; `scale` float32 and `zero` [rows, groups], of 32, 64 or 128 elements
    each -> uint8 [rows, bytes of a row] of the format for such groups. The scale of a group must be a number of
    bfloat16 or float16, since its lowest bits must be free.
    """
    rows, groups = scale.shape
    bits = bits_as(converted(scale, "float32"), "int32")
    assert not (bits & INT4_ZERO_BITS).any(), "a scale is a number of 16 bits"
    first = bits_as(bits | converted(zero, "int32"), "uint8").reshape(rows, groups, 4)
    parts = converted(whole, "uint8").reshape(rows, groups, -1, 2, 16)
    nibbles = (parts[..., 0, :] | parts[..., 1, :] << 4).reshape(rows, groups, -1)
    return cast(AnyArray, library(scale).concatenate((first, nibbles), axis=2).reshape(rows, -1))


def pack_float8(values: AnyArray, scale: AnyArray) -> AnyArray:
    """Pack float8 numbers with their scales into blocks.

    `values` float8_e4m3fn [rows, in], `scale` float32 [rows, groups], of 32, 64 or 128 elements each -> uint8 [rows,
    bytes of a row] of the format for such groups.
    """
    rows, groups = scale.shape
    raw = bits_as(values, "uint8").reshape(rows, groups, -1)
    has_nan = ((raw & 0x7F) == 0x7F).any(2)
    scale = converted(library(scale).where(has_nan, math.nan, scale), "float32")
    blocks = library(scale).concatenate((bits_as(scale[:, :, None], "uint8"), raw), axis=2)
    return cast(AnyArray, blocks.reshape(rows, -1))


def pack_mxfp4(pairs: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Pack MXFP4 numbers, neighbours of a row in each byte, with their exponents into blocks.

    `pairs` uint8 [rows, groups, 16], the first number in the lower half; `exponents` uint8 [rows, groups] -> uint8
    [rows, bytes of a row].
    """
    codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(*exponents.shape, 32)
    return np.concatenate((exponents[..., None], codes[..., :16] | codes[..., 16:] << 4), axis=2).reshape(
        len(pairs), -1
    )


def _q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks[:, 2:6]) - 16)


def _q5_1(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) + _fifth_bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * bits_as(blocks[:, 2:], "int8")


def _q4_k(blocks: Array) -> Array:
    scales, minima = _scales_and_minima(blocks)
    return _scaled(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)), scales, minima)


def _q5_k(blocks: Array) -> Array:
    scales, minima = _scales_and_minima(blocks)
    # Bit s of byte i is the fifth bit of weight i of part s.
    fifth = (blocks[:, None, 16:48] >> like(blocks, np.arange(8, dtype=np.uint8)[:, None])) & 1
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32))
    return _scaled(low.reshape(-1, 8, 32) + (fifth << 4), scales, minima)


def _q6_k(blocks: Array) -> Array:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    upper = ((high >> like(blocks, np.arange(0, 8, 2, dtype=np.uint8)[:, None])) & 3) << 4
    # Each half has the low nibbles of 64 bytes, then the high ones.
    lower: Array = library(blocks).concatenate((low & 15, low >> 4), axis=2)
    scale = _half(blocks, 208) * bits_as(blocks[:, 192:208], "int8")
    integers = bits_as((lower | upper).reshape(-1, 16, 16), "int8") - 32
    return (scale[:, :, None] * integers).reshape(-1, 256)


def _iq4_nl(blocks: Array) -> Array:
    return _half(blocks, 0) * _of_codes(blocks[:, 2:], IQ4_VALUES)


def _iq4_xs(blocks: Array) -> Array:
    # Part i has four low bits in byte 4 + i / 2, and two high ones in bytes 2 and 3.
    high = blocks[:, 2:4].reshape(-1, 2, 1) >> like(blocks, np.arange(0, 8, 2, dtype=np.uint8))
    low: Array = library(blocks).stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).reshape(-1, 8)
    integers = bits_as(low | (high.reshape(-1, 8) & 3) << 4, "int8") - 32
    scale = _half(blocks, 0) * integers
    return (scale[:, :, None] * _of_codes(blocks[:, 8:].reshape(-1, 8, 16), IQ4_VALUES)).reshape(-1, 256)


def _mxfp4(blocks: Array) -> Array:
    """Return numbers times a power of 2 (OCP Microscaling Formats 1.0, 2023); its exponent plus 127 comes first.

    As in ggml, half of the power and the doubled numbers are multiplied.
    """
    halves = np.array([2.0 ** (exponent - 128) for exponent in range(256)], np.float32)
    return like(blocks, halves)[_index(blocks[:, :1])] * _of_codes(blocks[:, 1:], [2 * v for v in MXFP4_VALUES])


def _int4(blocks: Array) -> Array:
    bits = bits_as(blocks[:, :4], "int32")
    scale, zero = bits_as(bits & ~INT4_ZERO_BITS, "float32"), converted(bits & INT4_ZERO_BITS, "float32")
    size = blocks.shape[1] - 4
    nibbles = _nibbles(blocks[:, 4:].reshape(len(blocks), size // 16, 16))
    return scale * (nibbles.reshape(len(blocks), 2 * size) - zero)


def _fp8(blocks: Array) -> Array:
    return bits_as(blocks[:, :4], "float32") * converted(bits_as(blocks[:, 4:], "float8_e4m3fn"), "float32")


_DEQUANTIZE: dict[str, Callable[[Array], Array]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "int4_g32": _int4,
    "int4_g64": _int4,
    "int4_g128": _int4,
    "fp8_g32": _fp8,
    "fp8_g64": _fp8,
    "fp8_g128": _fp8,
}


def _half(blocks: Array, begin: int) -> Array:
    """Return the float16 at byte `begin` of each block, [blocks, 1] float32."""
    return converted(bits_as(blocks[:, begin : begin + 2], "float16"), "float32")


def _nibbles(packed: Array) -> Array:
    """Split bytes [..., bytes] into [..., 2 * bytes] int8: the low four bits of all bytes, then the high ones."""
    halves: Array = library(packed).concatenate((packed & 15, packed >> 4), axis=-1)
    return bits_as(halves, "int8")


def _of_codes(packed: Array, values: Sequence[float]) -> Array:
    """Return the values of 4-bit codes, [..., bytes] -> [..., 2 * bytes] float32."""
    return like(packed, np.array(values, np.float32))[_index(_nibbles(packed))]


def _index(array: Array) -> Array:
    """Return integers as indices, which torch takes as int32 and int64 only."""
    return array if isinstance(array, np.ndarray) else converted(array, "int32")


def _fifth_bits(packed: Array) -> Array:
    """Return each bit of [blocks, 4 bytes] as the fifth bit of a weight, [blocks, 32] int8."""
    bits = (packed[:, :, None] >> like(packed, np.arange(8, dtype=np.uint8))) & 1
    return bits_as(bits.reshape(-1, 32) << 4, "int8")


def _scales_and_minima(blocks: Array) -> tuple[Array, Array]:
    """Return the scales and minima of Q4_K and Q5_K, [blocks, 8] float32 each.

    They have 6 bits for each part, packed in 12 bytes after two float16. The first four are the low 6 bits of bytes 0
    to 3 (scales) and 4 to 7 (minima). The last four are the nibbles of bytes 8 to 11, and above them the two high bits
    of bytes 0 to 3 and 4 to 7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    join = library(blocks).concatenate
    scales = join((first & 63, third & 15 | (first >> 6) << 4), axis=1)
    minima = join((second & 63, third >> 4 | (second >> 6) << 4), axis=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _scaled(integers: Array, scales: Array, minima: Array) -> Array:
    """Return the weights of integers in 8 parts of 32, [blocks, 256]."""
    return (scales[:, :, None] * integers.reshape(-1, 8, 32) - minima[:, :, None]).reshape(-1, 256)
