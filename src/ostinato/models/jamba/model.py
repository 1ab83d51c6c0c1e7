"""Jamba (model_type `jamba`): a Mamba-1 mixer or attention without positions, then a gated MLP or experts."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mamba import Mamba1Mixer
from ostinato.layers.mlp import GatedMLP, RoutedMLP
from ostinato.layers.module import Module
from ostinato.models.base import Block, CausalLM
from ostinato.models.jamba.spec import JambaHyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba1Spec

NAMES = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}


class Jamba(CausalLM):
    """The language model."""

    backbone_names = (("norm", "final_layernorm"),)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: JambaHyperparameters = self.spec.hyperparameters
        mlp: Module = GatedMLP(build, size, hyper.intermediate_size)
        if layer.experts is not None:
            mlp = RoutedMLP(build, layer.experts, normalizes=False, router="router")
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=None if layer.attention is None else Attention(build, size, layer.attention),
            mixer=self._mamba(layer.mixer, hyper) if isinstance(layer.mixer, Mamba1Spec) else None,
            mlp=mlp,
            names=NAMES,
        )

    def _mamba(self, spec: Mamba1Spec, hyper: JambaHyperparameters) -> Mamba1Mixer:
        return Mamba1Mixer(
            self.build,
            self.spec.hidden_size,
            spec,
            inner_norms="weighted",
            eps=hyper.norm_eps,
            bias=hyper.mamba_proj_bias,
            conv_bias=hyper.conv_bias,
        )
