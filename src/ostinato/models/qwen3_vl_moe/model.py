"""Qwen3-VL with experts (model_type `qwen3_vl_moe`)."""

from __future__ import annotations

from ostinato.layers.mlp import RoutedMLP
from ostinato.models.decoder import Block
from ostinato.models.qwen3.model import qwen3_block
from ostinato.models.qwen3_vl.model import Qwen3VL
from ostinato.plan.layer_specs import LayerSpec

STACKS = ("gate_up_proj", "down_proj")
"""Names of a layer's experts, which the checkpoint may store transposed."""


class Qwen3VLMoe(Qwen3VL):
    """Language model with its encoder."""

    transposable = tuple(f".experts.{name}" for name in STACKS)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        mlp = None if layer.experts is None else RoutedMLP(build, layer.experts, stacked_as=STACKS)
        return qwen3_block(build, size, layer, self.spec.hyperparameters.text, mlp)
