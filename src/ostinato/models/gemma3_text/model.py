"""Gemma 3, its text model (model_type `gemma3_text`), also inside `gemma3`, and Gemma 2.

Attention and MLP each have a norm before and after them, and layers are local or global. All norms are stored less 1.
"""

from __future__ import annotations

from ostinato.layers.attention import Attention
from ostinato.layers.mlp import GatedMLP
from ostinato.layers.module import ModelBuilder
from ostinato.models.base import CausalLM, SandwichBlock
from ostinato.models.gemma3_text.spec import Gemma3Hyperparameters
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


class Gemma3(CausalLM):
    """The language model."""

    norm_plus_one = True

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(
            build,
            spec,
            embedding_multiplier=build.rounded(spec.hidden_size**0.5),
            logits_cap=spec.hyperparameters.logits_cap,
        )

    def make_block(self, layer: LayerSpec) -> SandwichBlock:
        build, size = self.build, self.spec.hidden_size
        hyper: Gemma3Hyperparameters = self.spec.hyperparameters
        assert layer.attention is not None, "every layer has attention"
        attention = Attention(
            build,
            size,
            layer.attention,
            bias=hyper.attention_bias,
            qk_norm_eps=hyper.norm_eps if hyper.has_qk_norms else None,
            qk_norm_plus_one=True,
            scale=hyper.scale,
        )
        mlp = GatedMLP(build, size, hyper.intermediate_size, activation="geglu")
        return SandwichBlock(build, size, hyper.norm_eps, attention=attention, mlp=mlp, norm_plus_one=True)
