"""OLMo Hybrid (model_type `olmo_hybrid`): a gated delta net after a norm, or attention before a norm."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.delta_net import GatedDeltaNet
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import Module
from ostinato.models.base import Block, CausalLM, PostNormBlock
from ostinato.models.olmo_hybrid.spec import OlmoHybridHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec

DELTA_NORM_EPS = 1e-5
"""Epsilon of the norm after a delta net, which config.json does not give."""
NAMES = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}
"""Names of norms in current transformers by those in published checkpoints."""


class OlmoHybrid(CausalLM):
    """The language model."""

    def make_block(self, layer: LayerSpec) -> Module:
        build, size = self.build, self.spec.hidden_size
        hyper: OlmoHybridHyperparameters = self.spec.hyperparameters
        if layer.attention is not None:
            bias, eps = hyper.attention_bias, hyper.norm_eps
            attention = Attention(build, size, layer.attention, bias=bias, qk_norm_eps=eps, qk_norm_whole=True)
            return PostNormBlock(
                build, size, eps, attention=attention, mlp=GatedMLP(build, size, hyper.intermediate_size)
            )
        assert isinstance(layer.mixer, GatedDeltaSpec), "a layer has attention or a delta net"
        mixer = GatedDeltaNet(
            build, size, layer.mixer, eps=DELTA_NORM_EPS, stored="one_by_one", beta_scale=hyper.beta_scale
        )
        mlp = GatedMLP(build, size, hyper.intermediate_size)
        return Block(build, size, hyper.norm_eps, mixer=mixer, mlp=mlp, names={"mixer": "linear_attn"})

    def checkpoint_name(self, name: str) -> str | None:
        """Translate the names of norms in published checkpoints to those in current transformers."""
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        return super().checkpoint_name(name)
