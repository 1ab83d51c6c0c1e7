"""Short convolution as a layer (LFM2): projection, gate, convolution, gate, projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.causal_conv import CausalConv
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module
from ostinato.plan.mixers import ShortConvSpec

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step import LayerCache, StepInputs


class ShortConv(Module):
    """out_proj(C * conv(B * x)) + residual, where in_proj gives B, C and x."""

    def __init__(self, build: ModelBuilder, hidden_size: int, spec: ShortConvSpec, *, bias: bool) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.in_proj = Linear(build, hidden_size, 3 * spec.channels, bias, segments=(spec.channels,) * 3)
        self.conv = CausalConv(build, spec.channels, spec.width, bias, activation=None)
        self.out_proj = Linear(build, spec.channels, hidden_size, bias, cuts_inputs=True)

    def forward(self, x: torch.Tensor, step: StepInputs, memory: LayerCache, residual: torch.Tensor) -> torch.Tensor:
        """Apply the convolution to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        before, after, inner = self.in_proj(x).split(self.spec.channels, dim=-1)
        gated = self.ops.multiply(before, inner)
        convolved = self.ops.tap.split("state", self.conv, (gated,), step, memory)
        return self.out_proj(self.ops.multiply(after, convolved), residual)
