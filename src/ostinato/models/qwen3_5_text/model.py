"""Qwen3.5, its text model (model_type `qwen3_5_text`): a gated delta net or gated attention, then a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.layers.attention import Attention
from ostinato.layers.delta_net import GatedDeltaNet
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import Module
from ostinato.models.base import Block, CausalLM, PredictionHead
from ostinato.models.qwen3_5_text.spec import Qwen35Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec


class Qwen35(CausalLM):
    """The language model. All norms but those of delta nets are stored less 1."""

    norm_plus_one = True

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        """Make a block whose attention sees no key before position `first_key`."""
        build, size = self.build, self.spec.hidden_size
        hyper: Qwen35Hyperparameters = self.spec.hyperparameters
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
            delta_net = GatedDeltaNet(build, size, layer.mixer, eps=eps, stored=hyper.stored)
        return Block(
            build,
            size,
            eps,
            attention=attention,
            mixer=delta_net,
            mlp=self.make_mlp(layer),
            names={"mixer": "linear_attn"},
            norm_plus_one=True,
        )

    def make_mlp(self, _: LayerSpec) -> Module:
        """Make the MLP of a block."""
        return GatedMLP(self.build, self.spec.hidden_size, self.spec.hyperparameters.intermediate_size)

    def make_head(self, layers: Sequence[LayerSpec]) -> PredictionHead:
        how: dict[str, Any] = {"names": {"blocks": "layers"}, "norm_plus_one": True}
        return PredictionHead(self.build, self.spec, layers, self.make_block, **how)

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; return None for tensors of a prediction head that is not used."""
        if name.startswith("mtp."):
            return None if self.mtp is None else name
        return super().checkpoint_name(name)
