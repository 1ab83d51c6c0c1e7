"""Falcon-H1 (model_type `falcon_h1`): attention and a Mamba-2 mixer side by side, then a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ostinato.layers.attention import Attention
from ostinato.layers.build import Build
from ostinato.layers.linear import Embedding
from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.norm import RMSNorm
from ostinato.layers.rotary import Rotary
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.models.base import CausalLM
from ostinato.models.falcon_h1.spec import FalconH1Hyperparameters
from ostinato.plan.model import ModelSpec


class Block(nn.Module):
    """Attention and the mixer on one norm of the residual stream, both added to it; then the MLP on another.

    `ssm_scale` [in_proj_size] float32 multiplies the mixer's projected input.
    """

    def __init__(self, build: Build, hidden_size: int, hyper: FalconH1Hyperparameters, ssm_scale: torch.Tensor) -> None:
        super().__init__()
        multipliers = hyper.multipliers
        self.input_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.self_attn = Attention(
            build,
            hidden_size,
            hyper.attention,
            bias=hyper.attention_bias,
            out_bias=hyper.attention_bias,
            in_multiplier=multipliers.attention_in,
            key_multiplier=multipliers.key,
            out_multiplier=multipliers.attention_out,
        )
        group_size = hyper.mamba2.intermediate_size // hyper.mamba2.num_groups
        self.mamba = Mamba2Mixer(
            build,
            hidden_size,
            hyper.mamba2,
            eps=hyper.norm_eps,
            norm_group_size=group_size if hyper.mamba_norm else None,
            norm_before_gate=hyper.mamba_norm_before_gate,
            proj_bias=hyper.mamba_in_bias,
            out_bias=hyper.mamba_out_bias,
            conv_bias=hyper.conv_bias,
            dt_limit=hyper.dt_limit,
            in_multiplier=multipliers.ssm_in,
            in_scale=ssm_scale,
            out_multiplier=multipliers.ssm_out,
        )
        self.pre_ff_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.feed_forward = GatedMLP(
            build,
            hidden_size,
            hyper.intermediate_size,
            hyper.mlp_bias,
            gate_multiplier=multipliers.mlp_gate,
            down_multiplier=multipliers.mlp_down,
        )

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        y = self.input_layernorm(x)
        x = self.mamba(y, step, memory, x)
        x = self.self_attn(y, angles, step, memory, x)
        return self.feed_forward(self.pre_ff_layernorm(x), x)


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: FalconH1Hyperparameters = spec.hyperparameters
        assert spec.rope is not None
        self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size, hyper.multipliers.embedding)
        scale = _ssm_scale(build, hyper)
        self.layers = nn.ModuleList(Block(build, spec.hidden_size, hyper, scale) for _ in spec.layers)
        self.final_layernorm = RMSNorm(build, spec.hidden_size, hyper.norm_eps)
        self.rotary = Rotary(build, spec.rope)

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        x = self.embed_tokens(step.token_ids)
        angles = self.rotary(step.positions)
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, angles, step, layer_memory)
        return self.final_layernorm(x)


class FalconH1(CausalLM):
    """The language model."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec, spec.hyperparameters.multipliers.logits)
        self.model = Backbone(build, spec)

    @property
    def embedding(self) -> Embedding:
        return self.model.embed_tokens

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        return self.model(step, memory)


def _ssm_scale(build: Build, hyper: FalconH1Hyperparameters) -> torch.Tensor:
    """Each part's multiplier, at the part's channels of the mixer's projected input. -> [in_proj_size] float32"""
    spec = hyper.mamba2
    bc_size = spec.num_groups * spec.state_size
    sizes = (spec.intermediate_size, spec.intermediate_size, bc_size, bc_size, spec.num_heads)
    parts = zip(sizes, hyper.multipliers.ssm, strict=True)
    return torch.cat([torch.full((size,), m, dtype=torch.float32, device=build.device) for size, m in parts])
