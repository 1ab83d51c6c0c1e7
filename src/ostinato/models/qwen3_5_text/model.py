"""Qwen3.5, its text model (model_type `qwen3_5_text`): a gated delta net or gated attention, then a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.layers.attention import Attention
from ostinato.layers.delta_net import GatedDeltaNet
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.models.decoder import Block, Decoder
from ostinato.models.qwen3_5_text.head import AttentionHead, qwen35_head
from ostinato.models.qwen3_5_text.spec import Qwen35Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec, StoredDeltaNet
from ostinato.plan.model import ModelSpec


class Qwen35(Decoder):
    """The language model. All norms but those of delta nets are stored less 1."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec, norm_eps=spec.hyperparameters.norm_eps, norm_plus_one=True)

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        """Make a block whose attention sees no key before position `first_key`."""
        hyper: Qwen35Hyperparameters = self.spec.hyperparameters
        return qwen35_block(self.build, self.spec.hidden_size, layer, hyper, first_key=first_key)

    def make_head(self, layers: Sequence[LayerSpec]) -> AttentionHead:
        return qwen35_head(self.build, self.spec, layers, self.make_block, self.spec.hyperparameters.norm_eps)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; return None for tensors of a prediction head that is not used."""
        if name.startswith("mtp."):
            return None if self.mtp is None else name
        return super().checkpoint_name(name)


def qwen35_block(
    build: ModelBuilder,
    size: int,
    layer: LayerSpec,
    hyper: Qwen35Hyperparameters,
    mlp: Module | None = None,
    stored: StoredDeltaNet = "apart",
    first_key: int = 0,
) -> Block:
    """Build a layer of Qwen3.5.

    `mlp` replaces the gated MLP (by experts), `stored` is the delta net's layout, `first_key` the attention's first
    key.
    """
    eps, attention, delta_net = hyper.norm_eps, None, None
    if layer.attention is not None:
        attention = Attention(
            build,
            size,
            layer.attention,
            bias=hyper.attention_bias,
            qk_norm_eps=eps,
            qk_norm_plus_one=True,
            is_gated=True,
            first_key=first_key,
        )
    if isinstance(layer.mixer, GatedDeltaSpec):
        delta_net = GatedDeltaNet(build, size, layer.mixer, eps=eps, stored=stored)
    return Block(
        build,
        size,
        eps,
        attention=attention,
        mixer=delta_net,
        mlp=GatedMLP(build, size, hyper.intermediate_size) if mlp is None else mlp,
        names={"mixer": "linear_attn"},
        norm_plus_one=True,
    )
