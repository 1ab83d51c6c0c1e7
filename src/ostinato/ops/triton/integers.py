"""8-bit integers with a scale for each row, as `ops/int8.py` defines them, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(largest, x):
    """Return `largest` or the largest magnitude in a row of `x` [rows, elements], [rows].

    It is NaN if either contains one.
    """
    x = tl.abs(x.to(tl.float32))
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    most = tl.where(has_nan, float("nan"), tl.max(x, 1))
    return tl.where((most > largest) | (most != most), most, largest)


@triton.jit
def scale_of(largest):
    """Return the scale of rows with these largest magnitudes. Division rounds to the nearest float, as everywhere."""
    return tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))


@triton.jit
def rounded_to_integer(x, scale):
    """Round `x` [rows, elements] to steps of each row's scale, to nearest even."""
    divisor = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros(x.shape, tl.float32)
    steps = tl.div_rn(x.to(tl.float32), divisor)
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    # A float of 1.5 * 2^23 has no fractional bits, so its lowest bits are the integer.
    return ((steps + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)
