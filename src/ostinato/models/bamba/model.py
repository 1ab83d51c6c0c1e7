"""Bamba (model_type `bamba`): a Mamba-2 mixer or attention, then a gated MLP, in every layer."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mamba2 import Mamba2Mixer
from ostinato.layers.mlp import GatedMLP
from ostinato.models.bamba.spec import BambaHyperparameters
from ostinato.models.decoder import Block, Decoder
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec

NAMES = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}


class Bamba(Decoder):
    """The language model."""

    backbone_names = (("norm", "final_layernorm"),)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        hyper: BambaHyperparameters = self.spec.hyperparameters
        attention = None
        if layer.attention is not None:
            attention = Attention(build, size, layer.attention, bias=hyper.attention_bias)
        return Block(
            build,
            size,
            hyper.norm_eps,
            attention=attention,
            mixer=self._mamba(layer.mixer, hyper) if isinstance(layer.mixer, Mamba2Spec) else None,
            mlp=GatedMLP(build, size, hyper.intermediate_size, hyper.mlp_bias),
            names=NAMES,
        )

    def _mamba(self, spec: Mamba2Spec, hyper: BambaHyperparameters) -> Mamba2Mixer:
        return Mamba2Mixer(
            self.build,
            self.spec.hidden_size,
            spec,
            eps=hyper.norm_eps,
            proj_bias=hyper.mamba_proj_bias,
            conv_bias=hyper.conv_bias,
            dt_limit=hyper.dt_limit,
        )
