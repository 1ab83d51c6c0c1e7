"""Functions of `ops.activations`, in float32 on a GPU.

For activations with gates (`results.GATED`), they are applied to the gate; the caller multiplies it with the other
half.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, NAME: tl.constexpr):
    if NAME == "silu" or NAME == "swiglu":
        x = silu(x)
    elif NAME == "relu2":
        x = tl.where(x > 0, x * x, x * 0)  # NaN stays NaN.
    elif NAME == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_pytorch_tanh" or NAME == "geglu":
        # 1 + tanh(z) is twice the logistic function of 2 z.
        x = x / (1 + tl.exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))
