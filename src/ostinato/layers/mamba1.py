"""Mamba-1 mixer (Gu and Dao 2023, arXiv 2312.00752, section 3): projection, convolution, selective recurrence, gate."""

from __future__ import annotations

from typing import Literal

from ostinato.layers.conv import CausalConv
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module, split_columns
from ostinato.layers.norm import GatedRMSNorm, PlainRMSNorm, RMSNorm
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs, apply_selective_recurrence
from ostinato.plan.mixers import Mamba1Spec

InnerNorms = Literal["none", "plain", "weighted"]
"""Norms of time steps, B and C: none (Mamba), RMS norms without weights (Falcon-Mamba) or with weights (Jamba)."""


class Mamba1Mixer(Module):
    """One state layer's mixer. `bias` is for the projections of input and output.

    Time steps come out of a projection of low rank, whose bias the recurrence adds in float32.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: Mamba1Spec,
        *,
        inner_norms: InnerNorms,
        eps: float,
        bias: bool = False,
        conv_bias: bool = True,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        channels, rank, size = spec.channels, spec.time_step_rank, spec.state_size
        self.in_proj = Linear(build, hidden_size, 2 * channels, bias, segments=(channels, channels))
        self.conv1d = CausalConv(build, channels, spec.conv_kernel, conv_bias)
        self.x_proj = Linear(build, channels, rank + 2 * size, cuts_inputs=True)
        self.dt_proj = Linear(build, rank, channels)
        bias_name = ("dt_proj.bias",)
        self.dt_bias = self.declare(build, "dt_bias", channels, role="per_head", in_float32=True, names=bias_name)
        self.A_log = self.declare(build, "A_log", channels, size, role="per_head", in_float32=True)
        self.D = self.declare(build, "D", channels, role="per_head", in_float32=True)
        if inner_norms != "none":
            norm = PlainRMSNorm if inner_norms == "plain" else RMSNorm
            self.dt_layernorm = norm(build, rank, eps)
            self.b_layernorm = norm(build, size, eps)
            self.c_layernorm = norm(build, size, eps)
        self.has_norms = inner_norms != "none"
        self.gate = GatedRMSNorm(build, channels, eps, group_size=None)
        self.out_proj = Linear(build, channels, hidden_size, bias, cuts_inputs=True)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache, residual: Array) -> Array:
        """Apply the mixer to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        spec = self.spec
        conv_in, gate = split_columns(self.in_proj(x), (spec.channels, spec.channels))
        x = self.ops.hook.split("state", self.conv1d, (conv_in,), inputs, memory)
        dt, B, C = split_columns(self.x_proj(x), (spec.time_step_rank, spec.state_size, spec.state_size))
        if self.has_norms:
            dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
        y = self.ops.hook.split("state", self._recur, (x, self.dt_proj(dt), B, C), inputs, memory)
        return self.out_proj(self.gate(y, gate), residual)

    def _recur(self, x: Array, dt: Array, B: Array, C: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the recurrence along each row -> [tokens, channels]."""
        weights, ops = (self.A_log, self.D, self.dt_bias), self.ops
        operations = ops.selective_update, ops.selective_scan, ops.concat
        return apply_selective_recurrence(inputs, memory, (x, dt, B, C), weights, *operations)
