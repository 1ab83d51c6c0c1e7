"""Llama and the models that differ from it in values of its spec: attention, and a gated MLP or experts."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP, RoutedMLP
from ostinato.layers.module import ModelBuilder
from ostinato.models.decoder import Block, Decoder
from ostinato.models.llama.spec import LlamaHyperparameters
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec

STACKS = ("gate_up_proj", "down_proj")
"""Names of a layer's experts, if a checkpoint has them as stacks."""


class Llama(Decoder):
    """The language model."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec, norm_eps=spec.hyperparameters.norm_eps)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: LlamaHyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        attention = Attention(
            build,
            size,
            layer.attention,
            bias=hyper.qkv_bias,
            out_bias=hyper.out_bias,
            qk_norm_eps=hyper.norm_eps if hyper.has_qk_norms else None,
        )
        if layer.experts is None:
            mlp = GatedMLP(build, size, hyper.intermediate_size, hyper.mlp_bias)
            return Block(build, size, hyper.norm_eps, attention=attention, mlp=mlp)
        experts = self._experts(layer.experts, hyper)
        return Block(build, size, hyper.norm_eps, attention=attention, mlp=experts, names={"mlp": hyper.experts_in})

    def _experts(self, spec: ExpertsSpec, hyper: LlamaHyperparameters) -> RoutedMLP:
        return RoutedMLP(
            self.build,
            spec,
            hyper.normalizes,
            names=hyper.expert_names,
            stacked_as=STACKS,
            may_be_stacked=True,
        )
