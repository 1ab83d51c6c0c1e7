"""Bamba (model_type `bamba`): a Mamba-2 mixer or attention, then a gated MLP, in every layer."""

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
from ostinato.models.bamba.spec import BambaHyperparameters
from ostinato.models.base import CausalLM
from ostinato.plan.model import ModelSpec


class Block(nn.Module):
    """The mixer, then the MLP, each on a norm of the residual stream and added to it."""

    def __init__(self, build: Build, hidden_size: int, kind: str, hyper: BambaHyperparameters) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        if kind == "mamba2":
            self.mamba = Mamba2Mixer(
                build,
                hidden_size,
                hyper.mamba2,
                eps=hyper.norm_eps,
                norm_group_size=hyper.mamba2.intermediate_size // hyper.mamba2.num_groups,
                proj_bias=hyper.mamba_proj_bias,
                conv_bias=hyper.conv_bias,
                dt_limit=hyper.dt_limit,
            )
        else:
            bias = hyper.attention_bias
            self.self_attn = Attention(build, hidden_size, hyper.attention, bias=bias, out_bias=bias)
        self.pre_ff_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.feed_forward = GatedMLP(build, hidden_size, hyper.intermediate_size, hyper.mlp_bias)

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor | None,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        y = self.input_layernorm(x)
        if self.kind == "mamba2":
            x = self.mamba(y, step, memory, x)
        else:
            x = self.self_attn(y, angles, step, memory, x)
        return self.feed_forward(self.pre_ff_layernorm(x), x)


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: BambaHyperparameters = spec.hyperparameters
        self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(build, spec.hidden_size, kind, hyper) for kind in hyper.kinds)
        self.final_layernorm = RMSNorm(build, spec.hidden_size, hyper.norm_eps)
        self.rotary = Rotary(build, spec.rope) if spec.rope is not None else None

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        x = self.embed_tokens(step.token_ids)
        angles = self.rotary(step.positions) if self.rotary is not None else None
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, angles, step, layer_memory)
        return self.final_layernorm(x)


class Bamba(CausalLM):
    """The language model."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.model = Backbone(build, spec)

    @property
    def embedding(self) -> Embedding:
        return self.model.embed_tokens

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        return self.model(step, memory)
