"""LFM3 (model_type `lfm3`): LFM2 with windows, a norm behind every part, and a gate for each head of attention."""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.conv import ShortConv
from ostinato.layers.mlp import GatedMLP
from ostinato.models.base import Block, CausalLM, SandwichBlock
from ostinato.models.lfm3.spec import Lfm3Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import ShortConvSpec

NAMES = {"input_layernorm": "operator_norm", "mixer": "conv", "mlp": "feed_forward"}
NORM_NAMES = {"post_attention_layernorm": "ffn_norm"}
SANDWICH_NAMES = {
    "post_attention_layernorm": "post_operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}


class Lfm3(CausalLM):
    """The language model."""

    backbone_names = (("norm", "embedding_norm"),)

    def make_block(self, layer: LayerSpec) -> Block | SandwichBlock:
        build, size = self.build, self.spec.hidden_size
        hyper: Lfm3Hyperparameters = self.spec.hyperparameters
        eps, attention, conv = hyper.norm_eps, None, None
        if layer.attention is not None:
            attention = Attention(
                build,
                size,
                layer.attention,
                bias=hyper.attention_bias,
                qk_norm_eps=eps,
                has_head_gates=hyper.has_head_gates,
            )
        if isinstance(layer.mixer, ShortConvSpec):
            conv = ShortConv(build, size, layer.mixer, bias=hyper.conv_bias)
        mlp = GatedMLP(build, size, hyper.intermediate_size, names=("w1", "w3", "w2"))
        if hyper.has_post_norms:
            names = NAMES | SANDWICH_NAMES
            return SandwichBlock(build, size, eps, attention=attention, mixer=conv, mlp=mlp, names=names)
        return Block(build, size, eps, attention=attention, mixer=conv, mlp=mlp, names=NAMES | NORM_NAMES)
