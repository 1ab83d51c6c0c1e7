"""Values of weights in blocks (`block_formats.py`): the definition of each format, in torch.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ostinato.ops.quant.block_formats import BLOCK_FORMATS, Blocks
from ostinato.ops.sizes import DEQUANT_SLAB, INT4_ZERO_BITS

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 4-bit codes of IQ4_NL and IQ4_XS."""

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 4-bit codes of MXFP4: a sign, two bits of exponent, one of mantissa."""


def dequantize(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights of `blocks` [..., bytes of a row] uint8 of the format `name`.

    -> [..., weights of a row] float32.
    """
    *outer, row = blocks.shape
    kind = BLOCK_FORMATS[name]
    each = blocks.reshape(-1, kind.num_bytes)
    return _DEQUANTIZE[name](each).reshape(*outer, row // kind.num_bytes * kind.elements)


def slabs(weight: torch.Tensor, blocks: Blocks, in_size: int) -> Iterator[torch.Tensor]:
    """Yield the rows of a matrix, uint8 of any shape, in slabs of float32 [rows, in]."""
    flat, begin = weight.view(-1), 0
    for name, rows in blocks:
        row_bytes = BLOCK_FORMATS[name].row_bytes(in_size)
        part = flat[begin : begin + rows * row_bytes].view(rows, row_bytes)
        begin += rows * row_bytes
        for slab in part.split(max(1, DEQUANT_SLAB // in_size)):
            yield dequantize(name, slab)


def pack_int4(whole: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit integers with their scales and zero points into blocks.

    `whole` [rows, in] are integers from 0 to 15; `scale` float32 and `zero` [rows, groups], of 32, 64 or 128 elements
    each -> uint8 [rows, bytes of a row] of the format for such groups. The scale of a group must be a number of
    bfloat16 or float16, since its lowest bits must be free.
    """
    rows, groups = scale.shape
    bits = scale.float().contiguous().view(torch.int32)
    assert not (bits & INT4_ZERO_BITS).any(), "a scale is a number of 16 bits"
    first = (bits | zero.int()).contiguous().view(torch.uint8).view(rows, groups, 4)
    parts = whole.to(torch.uint8).view(rows, groups, -1, 2, 16)
    nibbles = (parts[..., 0, :] | parts[..., 1, :] << 4).flatten(2)
    return torch.cat((first, nibbles), dim=2).flatten(1)


def pack_float8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Pack float8 numbers with their scales into blocks.

    `values` float8_e4m3fn [rows, in], `scale` float32 [rows, groups], of 32, 64 or 128 elements each -> uint8 [rows,
    bytes of a row] of the format for such groups.
    """
    rows, groups = scale.shape
    raw = values.contiguous().view(torch.uint8).view(rows, groups, -1)
    has_nan = ((raw & 0x7F) == 0x7F).any(dim=2)
    scale = torch.where(has_nan, torch.nan, scale.float()).unsqueeze(2)
    return torch.cat((scale.view(torch.uint8), raw), dim=2).flatten(1)


def pack_mxfp4(pairs: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Pack MXFP4 numbers, neighbours of a row in each byte, with their exponents into blocks.

    `pairs` uint8 [rows, groups, 16], the first number in the lower half; `exponents` uint8 [rows, groups] -> uint8
    [rows, bytes of a row].
    """
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2)
    return torch.cat((exponents.unsqueeze(-1), codes[..., :16] | codes[..., 16:] << 4), dim=2).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return _scaled(_nibbles(blocks[:, 16:].unflatten(1, (4, 32))), scales, minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    # Bit s of byte i is the fifth bit of weight i of part s.
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32)))
    return _scaled(low.reshape(-1, 8, 32) | fifth.int() << 4, scales, minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[:, :128].unflatten(1, (2, 2, 32)), blocks[:, 128:192].unflatten(1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = ((high >> shifts) & 3).int() << 4
    # Each half has the low nibbles of 64 bytes, then the high ones.
    lower = torch.cat((low & 15, low >> 4), dim=2).int()
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    values: torch.Tensor = scale[:, :, None] * ((lower | upper) - 32).reshape(-1, 16, 16)
    return values.flatten(1)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _iq4(blocks[:, 2:])


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = blocks[:, 2:4].int()
    high = ((high[:, :1] | high[:, 1:] << 8) >> torch.arange(0, 16, 2)) & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1).int()
    scale = _half(blocks, 0) * ((low | high << 4) - 32)
    return (scale[:, :, None] * _iq4(blocks[:, 8:].unflatten(1, (8, 16)))).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Return numbers times a power of 2 (OCP Microscaling Formats 1.0, 2023); its exponent plus 127 comes first.

    As in ggml, half of the power and the doubled numbers are multiplied.
    """
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * (2 * torch.tensor(MXFP4_VALUES)[_nibbles(blocks[:, 1:])])


def _int4(blocks: torch.Tensor) -> torch.Tensor:
    bits = blocks[:, :4].contiguous().view(torch.int32)
    scale, zero = (bits & ~INT4_ZERO_BITS).view(torch.float32), bits & INT4_ZERO_BITS
    return scale * (_nibbles(blocks[:, 4:].unflatten(1, (-1, 16))).flatten(1) - zero)


def _fp8(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, :4].contiguous().view(torch.float32)
    return scale * blocks[:, 4:].contiguous().view(torch.float8_e4m3fn).float()


_DEQUANTIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at byte `begin` of each block, [blocks, 1] float32."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., bytes] into [..., 2 * bytes] int32: the low four bits of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).int()


def _iq4(packed: torch.Tensor) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32)[_nibbles(packed)]


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return each bit of [blocks, 4 bytes] as the fifth bit of a weight, [blocks, 32] int32."""
    bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1).int() << 4


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of Q4_K and Q5_K, [blocks, 8] float32 each.

    They have 6 bits for each part, packed in 12 bytes after two float16. The first four are the low 6 bits of bytes 0
    to 3 (scales) and 4 to 7 (minima). The last four are the nibbles of bytes 8 to 11, and above them the two high bits
    of bytes 0 to 3 and 4 to 7.
    """
    first, second, third = blocks[:, 4:16].int().unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 63, third & 15 | (first >> 6) << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), dim=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _scaled(integers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Return the weights of integers in 8 parts of 32, [blocks, 256]."""
    return (scales[:, :, None] * integers.reshape(-1, 8, 32) - minima[:, :, None]).flatten(1)
