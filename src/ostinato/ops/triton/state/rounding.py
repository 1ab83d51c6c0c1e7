"""Rounding of states to the dtype of their slots: the same bits as `ops/state/rounding.py`, in a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.launcher import to_dtype


@triton.jit
def mix_rounding(x):
    """Apply the bijection of 32-bit integers of `ops/noise.py`; `x` is uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def noise_words(at, places):
    """Return words of 16 bits for some columns or channels; `at` is the mixed position and layer."""
    return (mix_rounding(at + places.to(tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def rounded_stochastically(state, channels, columns, position, noise, state_size, dtype: tl.constexpr, HAS_NOISE: tl.constexpr):
    """Round float32 `state` [channels, columns] to `dtype`, after the token at `position`.

    `channels` and `columns` are its indices in a layer's state [heads * head_dim, state_size]; `noise` is the layer.
    """
    if HAS_NOISE and dtype != tl.float32:
        position = position.to(tl.uint32)
        at = mix_rounding(mix_rounding(position) + noise.to(tl.uint32))
        words = noise_words(at, columns)[None, :] ^ noise_words(at, state_size + channels)[:, None]
        bits = state.to(tl.int32, bitcast=True)
        is_number = state == state
        if dtype == tl.bfloat16:
            carried = (bits + tl.where(is_number, words, 0)) >> 16
            kept = carried.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            words = words >> 3  # Keep as many of the 16 bits as float16 drops.
            sign = (bits >> 16) & 0x8000
            magnitude = bits & 0x7FFFFFFF
            normal = tl.minimum(((magnitude + words) >> 13) - (112 << 10), 0x7C00)
            size = tl.abs(state)
            is_small = size < 6.103515625e-05
            units = tl.where(is_small, size * 137438953472.0, 0.0).to(tl.int32)
            number = tl.where(is_small, (units + words) >> 13, normal)
            whole = tl.where(is_number, number, 0x7E00) | sign
            kept = whole.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        kept = to_dtype(state, dtype)
    return kept


@triton.jit
def step_size(dt, bias, low, high):
    """Return softplus(dt + bias) between `low` and `high`, in float32, precise also where it is small."""
    x = dt.to(tl.float32) + bias
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    # This is log(1 + e); the rounding error of 1 + e is divided out again.
    exact = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.minimum(tl.maximum(tl.where(x > 20.0, x, exact), low), high)
