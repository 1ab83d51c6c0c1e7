"""Qwen3 (model_type `qwen3`): attention with normed queries and keys, and a gated MLP, in every layer."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.decoder import Block, Decoder
from ostinato.models.qwen3.spec import Qwen3Hyperparameters
from ostinato.plan.layer_specs import LayerSpec


class Qwen3(Decoder):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Block:
        return qwen3_block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters)


def qwen3_block(
    build: ModelBuilder, size: int, layer: LayerSpec, hyper: Qwen3Hyperparameters, mlp: Module | None = None
) -> Block:
    """Build a layer of Qwen3; `mlp` replaces the gated MLP (by experts)."""
    assert layer.attention is not None, "every layer has attention"
    eps = hyper.norm_eps
    return Block(
        build,
        size,
        eps,
        attention=Attention(build, size, layer.attention, bias=hyper.attention_bias, qk_norm_eps=eps),
        mlp=GatedMLP(build, size, hyper.intermediate_size) if mlp is None else mlp,
    )
