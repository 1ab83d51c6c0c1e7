"""Qwen3 (model_type `qwen3`): attention with normed queries and keys, and a gated MLP, in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ostinato.layers.attention import Attention
from ostinato.layers.build import Build
from ostinato.layers.linear import Embedding
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.norm import RMSNorm
from ostinato.layers.rotary import Rotary
from ostinato.layers.step import LayerMemory, StepInputs
from ostinato.models.base import CausalLM
from ostinato.models.qwen3.spec import Qwen3Hyperparameters
from ostinato.plan.model import ModelSpec


class Block(nn.Module):
    """Attention, then the MLP, each on a norm of the residual stream and added to it. `mlp` stands in for the gated one
    (experts)."""

    def __init__(
        self, build: Build, hidden_size: int, hyper: Qwen3Hyperparameters, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.self_attn = Attention(
            build,
            hidden_size,
            hyper.attention,
            bias=hyper.attention_bias,
            out_bias=hyper.attention_bias,
            qk_norm_eps=hyper.norm_eps,
        )
        self.post_attention_layernorm = RMSNorm(build, hidden_size, hyper.norm_eps)
        self.mlp = GatedMLP(build, hidden_size, hyper.intermediate_size) if mlp is None else mlp

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        step: StepInputs,
        memory: LayerMemory,
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        x = self.self_attn(self.input_layernorm(x), angles, step, memory, x)
        return self.mlp(self.post_attention_layernorm(x), x)


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__()
        hyper: Qwen3Hyperparameters = spec.hyperparameters
        assert spec.rope is not None
        self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(build, spec.hidden_size, hyper) for _ in spec.layers)
        self.norm = RMSNorm(build, spec.hidden_size, hyper.norm_eps)
        self.rotary = Rotary(build, spec.rope)

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        x = self.embed_tokens(step.token_ids)
        angles = self.rotary(step.positions)
        for block, layer_memory in zip(self.layers, memory, strict=True):
            x = block(x, angles, step, layer_memory)
        return self.norm(x)


class Qwen3(CausalLM):
    """The language model."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.model = Backbone(build, spec)

    @property
    def embedding(self) -> Embedding:
        return self.model.embed_tokens

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        return self.model(step, memory)
