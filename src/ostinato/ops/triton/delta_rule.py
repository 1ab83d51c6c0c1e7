"""What the kernels of the gated delta rule share: a token's gates, and vectors of length 1."""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops.triton.rounding import step_size


@triton.jit
def unit(x, axis: tl.constexpr):
    """`x` in float32, each vector along `axis`, the last one, divided by its length."""
    x = x.to(tl.float32)
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, axis=axis) + 1e-6), axis)


@triton.jit
def log_decay(a, bias, A_log):
    """The logarithm of a decay, at most 0, in float32."""
    return -tl.exp(A_log) * step_size(a, bias, 0.0, float("inf"))


@triton.jit
def beta_of(b, scale):
    """scale sigmoid(b), in float32."""
    return scale / (1.0 + tl.exp(-b.to(tl.float32)))
