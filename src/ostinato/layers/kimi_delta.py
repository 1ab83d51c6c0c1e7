"""Kimi Delta Attention (arXiv 2510.26692): a delta net with one decay per key channel and a sigmoid gate.

Decays and gate come out of projections of low rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.layers.causal_conv import CausalConv
from ostinato.layers.delta_net import DeltaMixer
from ostinato.layers.linear import Linear, PackedLinear
from ostinato.layers.module import ModelBuilder
from ostinato.layers.norm import GatedRMSNorm
from ostinato.plan.mixers import GatedDeltaSpec

if TYPE_CHECKING:
    import torch

    from ostinato.ops.step import LayerCache, StepInputs


class KimiDeltaAttention(DeltaMixer):
    """One state layer's mixer.

    Queries, keys and values have the same number of heads, a projection and a convolution each.

    The decays of a head's key channels come out of `f_a_proj` and `f_b_proj`, and the output's gate out of `g_a_proj`
    and `g_b_proj`, with a head's number of channels in between.
    """

    beta_scale = 1.0

    def __init__(self, build: ModelBuilder, hidden_size: int, spec: GatedDeltaSpec, *, eps: float) -> None:
        super().__init__()
        assert spec.per_channel, "its decays are of key channels"
        self.ops = build.ops
        self.spec = spec
        self.names = {"norm": "o_norm", "out_proj": "o_proj"}
        keys, values, heads, rank = spec.key_size, spec.value_size, spec.num_heads, spec.key_dim
        self.in_proj = PackedLinear(build, hidden_size, (("q_proj", keys), ("k_proj", keys), ("v_proj", values)))
        self.sizes = (heads, rank, rank)
        small = zip(("b_proj", "f_a_proj", "g_a_proj"), self.sizes, strict=True)
        self.in_proj_small = PackedLinear(build, hidden_size, tuple(small))
        self.f_b_proj = Linear(build, rank, keys)
        self.g_b_proj = Linear(build, rank, values)
        convolutions = (("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values))
        self.conv1d = CausalConv(
            build, spec.conv_dim, spec.conv_kernel, bias=False, parts=convolutions, segments=(keys, keys, values)
        )
        self.A_log = self.declare(build, "A_log", 1, 1, heads, 1, role="per_head", in_float32=True)
        self.dt_bias = self.declare(build, "dt_bias", keys, role="per_head", in_float32=True)
        how = {"norm_before_gate": True, "shares_weight": True, "gate_is_sigmoid": True}
        self.norm = GatedRMSNorm(build, values, eps, spec.value_dim, **how)
        self.out_proj = Linear(build, values, hidden_size, cuts_inputs=True)

    @property
    def decay(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.A_log.flatten(0), self.dt_bias.view(-1, self.spec.key_dim)

    def forward(self, x: torch.Tensor, step: StepInputs, memory: LayerCache, residual: torch.Tensor) -> torch.Tensor:
        """Apply the mixer to `x` and add `residual`, both [tokens, hidden] -> [tokens, hidden]."""
        b, of_decay, of_gate = self.in_proj_small(x).split(self.sizes, dim=-1)
        a = self.f_b_proj(of_decay).unflatten(-1, (-1, self.spec.key_dim))
        y = self.ops.tap.split("state", self._mix, (self.in_proj(x), a, b), step, memory).flatten(1)
        return self.out_proj(self.norm(y, self.g_b_proj(of_gate)), residual)
