"""Quantisers of weights: 4-bit integers with zero points, and 8-bit integers with scales.

A 4-bit weight is scale * (integer - zero point), with a scale and a zero point for each group of elements of a row, and
integers from 0 to 15. The range of a group includes 0, which the zero point represents exactly.
`ops/quant/dequantize.py` defines the layout: formats `int4_g32`, `int4_g64` and `int4_g128`.

An 8-bit weight is an integer from -127 to 127, with a float32 scale per row or per group of elements of a row.
`group_size` is the number of elements in a group; the last group of a row is smaller if that does not divide the row.
None means one scale per row. Scales are [rows], or [rows, groups].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ostinato.ops.arrays import AnyArray, TorchArrays, bits_as, converted, dtype_name, host_values, library, write
from ostinato.ops.native_extension import NativeExtension
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.dequantize import pack_float8, pack_int4
from ostinato.ops.sizes import INT4_SHRINK, INT4_STEPS, INT4_ZERO_BITS, MAX_INT4, MAX_INT8
from ostinato.ops.step_inputs import Array

INT4_SLAB = 2**18
"""Values that torch quantises in one call."""

QuantizeInt4 = Callable[[np.ndarray, "Array", int], None]
"""Function (values [rows, in], weight uint8 [rows, bytes of a row], group size) -> None.

It writes the result of `quantize_int4` for the values into the weight's blocks.
"""


def quantize_int4(values: Array, group_size: int) -> tuple[Array, Array, Array]:
    """Quantise torch's `values` [rows, in] -> integers uint8 [rows, in], scales float32 and zero points uint8.

    Scales and zero points are [rows, groups].

    It tries `INT4_STEPS` scales. The first spans a group's range; each of the others spans less, so that more of the
    largest values are cut off. Each is replaced by the scale that fits its integers best (least squares: sum(v q) /
    sum(q^2) for values v and integers q less the zero point). The scale with the least squared error is used, and the
    values are rounded with it once more. A scale leaves the bits of the zero point free. A group with a value that is
    not finite has a scale that is not finite.
    """
    torch, v = library(values), values.float().unflatten(1, (-1, group_size))
    low, high = v.amin(dim=-1, keepdim=True).clamp(max=0), v.amax(dim=-1, keepdim=True).clamp(min=0)
    span = (high - low) / MAX_INT4
    divisor = torch.where(span > 0, span, 1.0)
    zero = (-low / divisor).round_()
    best, scale = torch.zeros_like(span), span
    for step in range(INT4_STEPS):
        q = _rounded(v, divisor * ((100 - INT4_SHRINK * step) / 100), zero)
        fit, size = (v * q).sum(dim=-1, keepdim=True), (q * q).sum(dim=-1, keepdim=True)
        # The squared error is sum(v^2) less this.
        gain = fit * fit / torch.where(size > 0, size, 1.0)
        scale = torch.where(gain > best, fit / size, scale)
        best = torch.maximum(best, gain)
    is_finite = span.isfinite()
    scale = torch.where(is_finite, _with_room(scale), torch.nan)
    whole = _rounded(v, torch.where(scale > 0, scale, 1.0), zero).add_(zero)
    whole, zero = (torch.where(is_finite, each, 0.0).to(torch.uint8) for each in (whole, zero))
    return whole.flatten(1), scale.squeeze(-1), zero.squeeze(-1)


def quantize_int4_into(values: np.ndarray, weight: Array, group_size: int) -> None:
    """Quantise by torch on the device of `weight`, as a `QuantizeInt4` function.

    It takes several times the memory of its values, so it works in slabs of rows.
    """
    target, rows = _of_torch(weight), max(1, INT4_SLAB // max(1, values.shape[1]))
    for begin in range(0, len(values), rows):
        slab = _of_torch(values[begin : begin + rows]).to(target.device)
        target[begin : begin + rows] = pack_int4(*quantize_int4(slab, group_size))


def _of_torch(array: np.ndarray | Array) -> Array:
    """Return torch's array of the same memory."""
    return TorchArrays("cpu").sharing(array) if isinstance(array, np.ndarray) else array


def native_quantize_int4(extension: NativeExtension, threads: int = 0) -> QuantizeInt4:
    """Return a `QuantizeInt4` function that calls an extension's kernel, which reads the values once and in place."""

    def quantize_by_kernel(values: np.ndarray, weight: Array, group_size: int) -> None:
        named = {"values": _readable(values), "weight": bits_as(weight, "int8"), "group_size": group_size}
        extension.quantize_int4(len(values), named, threads)

    return quantize_by_kernel


def _rounded(v: Array, scale: Array, zero: Array) -> Array:
    """Return the integers less the zero point."""
    whole = (v / scale).round_().add_(zero).clamp_(0, MAX_INT4)
    return whole.sub_(zero)


def _with_room(scale: Array) -> Array:
    """Return the nearest number whose bits for the zero point are 0."""
    torch = library(scale)
    return ((scale.view(torch.int32) + (INT4_ZERO_BITS + 1) // 2) & ~INT4_ZERO_BITS).view(torch.float32)


MAX_FLOAT8 = 448.0
"""Largest number of float8_e4m3fn."""

INT8_SLAB = 2**19
"""Values that torch quantises in one call."""

QuantizeInt8 = Callable[[np.ndarray, "Array", "Array", int | None], None]
"""Function (values [rows, in], weight int8 [rows, in], scale, group size) -> None.

It writes the result of `quantize_int8` for the values into the weight and its scale.
"""


def num_groups(in_size: int, group_size: int) -> int:
    return -(-in_size // group_size)


def quantize_int8(values: Array, group_size: int | None) -> tuple[Array, Array]:
    """Quantise torch's `values` [rows, in] -> int8 [rows, in] and scales.

    The largest magnitude becomes 127 and the rest is rounded to nearest, so the error is at most half a scale.
    """
    torch, grouped = library(values), _grouped(values.float(), group_size)
    scale = grouped.abs().amax(dim=-1, keepdim=True) / MAX_INT8
    whole = (grouped / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
    whole = whole.flatten(1)[:, : values.shape[1]].contiguous()
    return whole, scale.squeeze(-1) if group_size is not None else scale.view(-1)


def quantize_int8_into(values: np.ndarray, weight: Array, scale: Array, group_size: int | None) -> None:
    """Quantise by torch on the device of `weight`, as a `QuantizeInt8` function.

    It takes several times the memory of its values, so it works in slabs of rows.
    """
    target, scales, rows = _of_torch(weight), _of_torch(scale), max(1, INT8_SLAB // max(1, values.shape[1]))
    for begin in range(0, len(values), rows):
        slab = _of_torch(values[begin : begin + rows]).to(target.device)
        target[begin : begin + rows], scales[begin : begin + rows] = quantize_int8(slab, group_size)


def native_quantize_int8(extension: NativeExtension, threads: int = 0) -> QuantizeInt8:
    """Return a `QuantizeInt8` function that calls an extension's kernel, which reads the values once and in place."""

    def quantize_by_kernel(values: np.ndarray, weight: Array, scale: Array, group_size: int | None) -> None:
        named = {"values": _readable(values), "weight": weight, "scale": scale, "group_size": group_size}
        extension.quantize(len(values), named, threads)

    return quantize_by_kernel


def dequantize(weight: AnyArray, scale: AnyArray, group_size: int | None) -> AnyArray:
    """Return the values of `weight` int8 [rows, in] with its scales, [rows, in] in the dtype of the scales."""
    if group_size is None:
        return cast(AnyArray, weight * scale[:, None])
    repeat: Any = np.repeat if isinstance(scale, np.ndarray) else library(scale).repeat_interleave
    return cast(AnyArray, weight * repeat(scale, group_size, 1)[:, : weight.shape[1]])


def _grouped(values: Array, group_size: int | None) -> Array:
    """Split [rows, in] into [rows, groups, group_size], padding the last group with zeros."""
    if group_size is None:
        return values.unsqueeze(1)
    missing = num_groups(values.shape[1], group_size) * group_size - values.shape[1]
    groups: Array = library(values).nn.functional.pad(values, (0, missing)).unflatten(1, (-1, group_size))
    return groups


@dataclass(frozen=True)
class WeightQuantizers:
    """Quantisation functions, torch's by default."""

    int8: QuantizeInt8 = quantize_int8_into
    int4: QuantizeInt4 = quantize_int4_into

    def quantize_blocks(self, values: np.ndarray | Array, weight: Array, name: str) -> None:
        """Write `values` [rows, in] into `weight` [rows, bytes] uint8 in blocks of format `name` (`can_be_made`)."""
        values, made = host_values(values), BLOCK_FORMATS[name]
        assert made.can_be_made, f"the plan quantises no weights to {name}"
        elements = made.elements
        if made.family == "float8":
            write(weight, _float8(values.astype(np.float32), elements))
            return
        if made.family == "int4":
            self.int4(values, weight, elements)
            return
        groups = (len(values), values.shape[1] // elements)
        whole, scale = np.empty(values.shape, np.int8), np.empty(groups, np.float32)
        self.int8(values, cast("Array", whole), cast("Array", scale), elements)
        parts = scale.astype(np.float16)[:, :, None].view(np.uint8), whole.view(np.uint8).reshape(*groups, elements)
        write(weight, np.concatenate(parts, axis=2).reshape(len(values), -1))


def _float8(values: np.ndarray, elements: int) -> np.ndarray:
    """Return blocks of `values` float32 [rows, in], scaled so that a block's largest value is the largest of float8."""
    groups = values.reshape(len(values), -1, elements)
    scale = np.abs(groups).max(axis=2) / np.float32(MAX_FLOAT8)
    with np.errstate(invalid="ignore"):
        small = groups / np.where(scale > 0, scale, np.float32(1))[:, :, None]
    return pack_float8(converted(small.reshape(values.shape), "float8_e4m3fn"), scale)


BY_TORCH = WeightQuantizers()


def native_quantizers(extension: NativeExtension, threads: int = 0) -> WeightQuantizers:
    """Return the quantisers that use an extension's kernels, on `threads` threads (see `NativeKernel`)."""
    return WeightQuantizers(native_quantize_int8(extension, threads), native_quantize_int4(extension, threads))


def _readable(values: AnyArray) -> AnyArray:
    """Return values in a dtype that the kernels read."""
    return values if dtype_name(values.dtype) in ("bfloat16", "float16", "float32") else converted(values, "float32")
