"""gated_activation: a program takes a part of one token's result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import elementwise as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.activations import activate
from ostinato.ops.triton.launcher import to_dtype


@triton.jit
def gated_activation_kernel(x, out, size, stride, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate = tl.load(x + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + token * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * value
    tl.store(out + token * size + column, to_dtype(y, out.dtype.element_ty), mask=inside)


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute `ops.gated_activation`; its reference documents arguments and result."""
    tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    (launch,) = launches.gated_activation_launches(size=size, capability=launcher.capability(x))
    launcher.run(
        gated_activation_kernel,
        (tokens, cdiv(size, launch.blocks["COLUMNS"])),
        launch,
        x=x,
        out=out,
        size=size,
        stride=x.stride(0),
        ACTIVATION=activation,
    )
    return out
