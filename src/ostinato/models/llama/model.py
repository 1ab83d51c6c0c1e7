"""Llama and the models that differ from it only in their config.json: attention and a gated MLP in every layer."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder
from ostinato.models.decoder import Block, Decoder
from ostinato.models.llama.spec import LlamaHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


class Llama(Decoder):
    """The language model."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec, norm_eps=spec.hyperparameters.norm_eps)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: LlamaHyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=Attention(build, size, layer.attention, bias=hyper.qkv_bias, out_bias=hyper.out_bias),
            mlp=GatedMLP(build, size, hyper.intermediate_size, hyper.mlp_bias),
        )
