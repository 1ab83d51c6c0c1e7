"""LFM2 (model_type `lfm2`): a short convolution or attention with normed queries and keys, then a gated MLP."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.conv import ShortConv
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import Module
from ostinato.models.decoder import Block, Decoder
from ostinato.models.lfm2.spec import Lfm2Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import ShortConvSpec

NAMES = {
    "input_layernorm": "operator_norm",
    "mixer": "conv",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
}
ATTENTION_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}


class Lfm2(Decoder):
    """The language model."""

    backbone_names = (("norm", "embedding_norm"),)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size, attention, conv = self.build, self.spec.hidden_size, None, None
        hyper: Lfm2Hyperparameters = self.spec.hyperparameters
        if layer.attention is not None:
            attention = Attention(build, size, layer.attention, qk_norm_eps=hyper.norm_eps)
            attention.names = ATTENTION_NAMES
        if isinstance(layer.mixer, ShortConvSpec):
            conv = ShortConv(build, size, layer.mixer, bias=hyper.conv_bias)
        return Block(
            build, size, hyper.norm_eps, attention=attention, mixer=conv, mlp=self.make_mlp(layer), names=NAMES
        )

    def make_mlp(self, _: LayerSpec) -> Module:
        """Make the MLP of a block."""
        size = self.spec.hyperparameters.intermediate_size
        return GatedMLP(self.build, self.spec.hidden_size, size, names=("w1", "w3", "w2"))
