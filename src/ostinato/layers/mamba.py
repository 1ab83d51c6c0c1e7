"""Mixers of Mamba-1 and Mamba-2: projection, convolution, recurrence, gate.

Mamba-1 is that of Gu and Dao 2023 (arXiv 2312.00752, section 3), Mamba-2 that of Dao and Gu 2024 (arXiv 2405.21060).
"""

from __future__ import annotations

from typing import Literal

from ostinato.layers.conv import CausalConv
from ostinato.layers.linear import Linear
from ostinato.layers.module import ModelBuilder, Module, Multiplier, split_columns
from ostinato.layers.norm import GatedRMSNorm, PlainRMSNorm, RMSNorm
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs, apply_selective_recurrence
from ostinato.plan.mixers import Mamba1Spec, Mamba2Spec

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


class Mamba2Mixer(Module):
    """One state layer's mixer.

    The gated norm averages over the channels of a group; without `has_norm` only the gate is applied. `proj_bias` is
    for both projections, unless `out_bias` is given for the output's. `dt_limit` clamps the time step, in prefill and
    decode alike. `in_multiplier` multiplies the input, `in_scale` its projection (Falcon-H1), `out_multiplier` the
    output before the residual.
    """

    def __init__(
        self,
        build: ModelBuilder,
        hidden_size: int,
        spec: Mamba2Spec,
        *,
        eps: float,
        has_norm: bool = True,
        norm_before_gate: bool = False,
        proj_bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        in_multiplier: float = 1.0,
        in_scale: Multiplier = 1.0,
        out_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.dt_limit = dt_limit
        bc_size = spec.num_groups * spec.state_size
        of_conv = (spec.intermediate_size, bc_size, bc_size)
        segments = (spec.intermediate_size, *of_conv, spec.num_heads)
        self.in_proj = Linear(
            build, hidden_size, spec.in_proj_size, proj_bias, in_scale, in_multiplier, segments=segments
        )
        self.conv1d = CausalConv(build, spec.conv_dim, spec.conv_kernel, conv_bias, segments=of_conv)
        self.A_log = self.declare(build, "A_log", spec.num_heads, role="per_head", in_float32=True)
        self.D = self.declare(build, "D", spec.num_heads, role="per_head", in_float32=True)
        self.dt_bias = self.declare(build, "dt_bias", spec.num_heads, role="per_head", in_float32=True)
        group_size = spec.intermediate_size // spec.num_groups if has_norm else None
        self.norm = GatedRMSNorm(
            build, spec.intermediate_size, eps, group_size, norm_before_gate, spans_ranks=spec.norm_spans_ranks
        )
        out_bias = proj_bias if out_bias is None else out_bias
        self.splits = (spec.intermediate_size, spec.conv_dim, spec.num_heads), of_conv
        """Sizes of the parts of the projected input, and of the convolved part."""
        self.out_proj = Linear(build, spec.intermediate_size, hidden_size, out_bias, out_multiplier, cuts_inputs=True)

    def forward(self, x: Array, inputs: StepInputs, memory: LayerCache, residual: Array) -> Array:
        """Apply the mixer to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        gate, conv_in, dt = split_columns(self.in_proj(x), self.splits[0])
        y = self.ops.hook.split("state", self._mix, (conv_in, dt), inputs, memory)
        return self.out_proj(self.norm(y.reshape(x.shape[0], -1), gate), residual)

    def _mix(self, conv_in: Array, dt: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply convolution and recurrence along each row -> [tokens, heads, head_dim]."""
        return self._recur(self.conv1d(conv_in, inputs, memory), dt, inputs, memory)

    def _recur(self, convolved: Array, dt: Array, inputs: StepInputs, memory: LayerCache) -> Array:
        """Apply the recurrence to decode rows and the chunked scan to prefill rows -> [tokens, heads, head_dim]."""
        spec = self.spec
        heads, tokens = (spec.num_heads, spec.num_groups, spec.num_groups), convolved.shape[0]
        parts = zip(split_columns(convolved, self.splits[1]), heads, strict=True)
        x, B, C = (part.reshape(tokens, count, -1) for part, count in parts)
        return apply_selective_recurrence(
            inputs,
            memory,
            (x, dt, B, C),
            (self.A_log, self.D, self.dt_bias),
            self.ops.state_update,
            self.ops.ssd_scan,
            self.ops.concat,
            (self.dt_limit,),
            scan_options=(spec.chunk_size,),
        )
