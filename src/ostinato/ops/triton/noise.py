"""Noise of `ops.noise` in Triton: the same 32 bits, and logarithms that may differ in the last bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_bits(token, low, high):
    """Return the word of each `token`, for the key (`low`, `high`). All are uint32."""
    return mix(mix(token ^ low) + high)


@triton.jit
def mix(x):
    """Apply `ops.noise.mix` to uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def to_gumbel(bits):
    """Return Gumbel variates, float32, from uint32 words."""
    distance = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # This is log(1 - distance), accurate also where 1 - distance rounds, since the error is known exactly.
    rest = 1 - distance
    survival = tl.where(rest == 1, -distance, tl.log(rest) * distance / tl.where(rest == 1, 1.0, 1 - rest))
    waiting = tl.where((bits >> 31) == 1, tl.log(distance), survival)
    return -tl.log(-waiting)
