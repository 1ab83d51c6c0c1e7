"""Bamba (model_type `bamba`): a Mamba-2 mixer or attention, then a gated MLP, in every layer."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.models.bamba.spec import BambaHyperparameters
from ostinato.models.base import Block, CausalLM, mamba2_mixer
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec

NAMES = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}


class Bamba(CausalLM):
    """The language model."""

    backbone_names = (("norm", "final_layernorm"),)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: BambaHyperparameters = self.spec.hyperparameters
        attention, mixer = None, None
        if layer.attention is not None:
            attention = Attention(build, size, layer.attention, bias=hyper.attention_bias)
        if isinstance(layer.mixer, Mamba2Spec):
            mixer = mamba2_mixer(build, size, layer.mixer, hyper)
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=attention,
            mixer=mixer,
            mlp=GatedMLP(build, size, hyper.intermediate_size, hyper.mlp_bias),
            names=NAMES,
        )
