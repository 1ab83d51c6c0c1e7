"""The gated delta net (Yang et al. 2024, arXiv 2412.06464): projections, convolution, delta rule, gated norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.mamba2 import CausalConv
from ostinato.layers.module import Builder, Module
from ostinato.layers.norm import GatedRMSNorm
from ostinato.plan.mixers import GatedDeltaSpec

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step import LayerMemory, StepInputs

BETA_SCALE = 1.0
"""What the sigmoid of beta is multiplied with: it stays below 1."""


class GatedDeltaNet(Module):
    """One state layer's mixer. The norm behind the recurrence has one weight for all heads.

    In Qwen3.5's checkpoints queries, keys and values come out of one projection, the output's gate, beta and decay out
    of one each. If they lie `by_key_head` (Qwen3-Next), two projections give all of them, those of a key head side by
    side: its query, its key, the values of its heads, their gates; and betas, decays.
    """

    def __init__(
        self, build: Builder, hidden_size: int, spec: GatedDeltaSpec, *, eps: float, by_key_head: bool = False
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.spec = spec
        self.by_key_head = by_key_head
        if by_key_head:
            self.in_proj_qkvz = Linear(build, hidden_size, spec.conv_dim + spec.value_size)
            self.in_proj_ba = Linear(build, hidden_size, 2 * spec.num_heads)
        else:
            parts = (("in_proj_qkv", spec.conv_dim), ("in_proj_z", spec.value_size))
            self.in_proj = PackedLinear(build, hidden_size, parts)
            small = (("in_proj_b", spec.num_heads), ("in_proj_a", spec.num_heads))
            self.in_proj_ba = PackedLinear(build, hidden_size, small)
        self.conv1d = CausalConv(build, spec.conv_dim, spec.conv_kernel, bias=False)
        self.A_log = self.own(build, "A_log", spec.num_heads, role="per_head", in_float32=True)
        self.dt_bias = self.own(build, "dt_bias", spec.num_heads, role="per_head", in_float32=True)
        self.norm = GatedRMSNorm(build, spec.value_size, eps, spec.value_dim, norm_before_gate=True, shares_weight=True)
        self.out_proj = Linear(build, spec.value_size, hidden_size)

    def forward(self, x: torch.Tensor, step: StepInputs, memory: LayerMemory, residual: torch.Tensor) -> torch.Tensor:
        """`x` and `residual` [tokens, hidden] -> [tokens, hidden]"""
        conv_in, gate, b, a = self._project_by_key_head(x) if self.by_key_head else self._project(x)
        y = self.ops.tap.split("state", self._mix, (conv_in, a, b), step, memory).flatten(1)
        return self.out_proj(self.norm(y, gate), residual)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """-> what is convolved, the output's gate, beta and decay, each [tokens, its size]"""
        spec = self.spec
        conv_in, gate = self.in_proj(x).split((spec.conv_dim, spec.value_size), dim=-1)
        return conv_in, gate, *self.in_proj_ba(x).split((spec.num_heads, spec.num_heads), dim=-1)

    def _project_by_key_head(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As `_project`."""
        spec, groups = self.spec, (self.spec.num_key_heads, -1)
        values, heads = spec.value_size // spec.num_key_heads, spec.num_heads // spec.num_key_heads
        parts = self.in_proj_qkvz(x).unflatten(-1, groups).split((spec.key_dim, spec.key_dim, values, values), dim=-1)
        q, k, v, gate = (part.flatten(1) for part in parts)
        b, a = (part.flatten(1) for part in self.in_proj_ba(x).unflatten(-1, groups).split((heads, heads), dim=-1))
        return self.ops.concat(self.ops.concat(q, k), v), gate, b, a

    def _mix(
        self, conv_in: torch.Tensor, a: torch.Tensor, b: torch.Tensor, step: StepInputs, memory: LayerMemory
    ) -> torch.Tensor:
        """Convolution and recurrence, along each row. -> [tokens, heads, value_dim]"""
        spec = self.spec
        convolved = self.ops.causal_conv1d(
            conv_in,
            self.conv1d.weight,
            None,
            memory.states["conv"],
            step.row_starts,
            step.read_slots,
            step.write_slots,
            step.num_decode_rows,
            step.checkpoints,
        )
        q, k, v = convolved.split((spec.key_size, spec.key_size, spec.value_size), dim=-1)
        q, k = (part.unflatten(-1, (-1, spec.key_dim)) for part in (q, k))
        v = v.unflatten(-1, (-1, spec.value_dim))
        return self._recur(q, k, v, a, b, step, memory)

    def _recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """Decode rows and prefill rows, which differ in where their states go. -> [tokens, heads, value_dim]"""
        rows, tokens = step.num_decode_rows, step.num_decode_tokens
        if rows == 0:
            return self._scan(q, k, v, a, b, step, memory)
        decoded = self.ops.delta_update(
            q[:tokens],
            k[:tokens],
            v[:tokens],
            a[:tokens],
            b[:tokens],
            self.A_log,
            self.dt_bias,
            BETA_SCALE,
            memory.states["delta"],
            step.read_slots[:rows],
            step.write_slots[:rows],
        )
        if rows == step.read_slots.shape[0]:
            return decoded
        out = v.new_empty(v.shape)
        out[:tokens] = decoded
        out[tokens:] = self._scan(q[tokens:], k[tokens:], v[tokens:], a[tokens:], b[tokens:], step, memory)
        return out

    def _scan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """The prefill rows of a step, whose tokens alone are given. -> [tokens, heads, value_dim]"""
        rows, tokens = step.num_decode_rows, step.num_decode_tokens
        return self.ops.delta_scan(
            q,
            k,
            v,
            a,
            b,
            self.A_log,
            self.dt_bias,
            BETA_SCALE,
            memory.states["delta"],
            step.row_starts[rows:] - tokens,
            step.start_positions[rows:],
            step.read_slots[rows:],
            step.write_slots[rows:, 0],
            [(row - rows, offset, slot) for row, offset, slot in step.checkpoints],
        )
