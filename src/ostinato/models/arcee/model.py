"""Arcee (model_type `arcee`): attention and an MLP of two matrices in every layer."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import MLP
from ostinato.models.arcee.spec import ArceeHyperparameters
from ostinato.models.base import Block, CausalLM
from ostinato.plan.layer_specs import LayerSpec


class Arcee(CausalLM):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: ArceeHyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        bias = hyper.attention_bias
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=Attention(build, size, layer.attention, bias=bias, out_bias=bias),
            mlp=MLP(build, size, hyper.intermediate_size, hyper.mlp_activation, hyper.mlp_bias),
        )
