"""Qwen3-VL (model_types `qwen3_vl`, `qwen3_vl_moe`): Qwen3's blocks, with the outputs of an encoder of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.layers.attention import AxialRotary
from ostinato.layers.mlp import STACKED, GatedMLP, RoutedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.vision import VisionEncoder
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.llama.model import Llama
from ostinato.models.qwen3_vl.spec import Qwen3VLHyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import axes, inverse_frequencies


class TextBackbone(Backbone):
    """Backbone that injects the encoder's outputs into tokens of images after the embedding and the first layers."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec, *how: Any) -> None:
        """Make the parts of a `Backbone`, which documents the arguments."""
        super().__init__(build, spec, *how)
        assert spec.rope is not None
        assert spec.vision is not None
        self.hidden_rows = spec.vision.hidden_rows
        self.axial_rotary = AxialRotary(build, axes(spec.rope), *inverse_frequencies(spec.rope))

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the final normed hidden states of a step, [tokens, hidden].

        `memory` ends with that of the encoder's outputs; `inputs` has the tokens' positions in time, height and width.
        """
        assert self.inject_media is not None, "the model has an encoder"
        x = self.embed(inputs, memory)
        angles = self.axial_rotary(inputs.rope_positions)
        for i, (block, layer_memory) in enumerate(zip(self.layers, memory[: len(self.layers)], strict=True)):
            x = block(x, angles, inputs, layer_memory)
            if i + 1 < self.hidden_rows:
                x = self.inject_media(x, inputs.media_cells, memory[-1].media, i + 1, True)
        return self.norm(x)


class QwenVL(CausalLM):
    """Language model with Qwen3-VL's encoder and positions; a second base has its blocks."""

    backbone_type = TextBackbone
    encoder_name = "model.visual"
    """Checkpoint's name of the encoder."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.names = {"model": "model.language_model", "images": self.encoder_name}

    def make_encoder(self, vision: VisionSpec) -> Module:
        hyper: Qwen3VLHyperparameters = self.spec.encoder_hyperparameters
        return VisionEncoder(self.build, vision, hyper.theta, hyper.activation)


class Qwen3VL(QwenVL, Llama):
    """Language model with its encoder."""


class Qwen3VLMoe(Qwen3VL):
    """A `Qwen3VL` with experts, whose stacks the checkpoint may have transposed."""

    transposable = tuple(f".experts.{name}" for name in STACKED)

    def make_mlp(self, layer: LayerSpec) -> GatedMLP | RoutedMLP:
        if layer.experts is None:
            return super().make_mlp(layer)
        return RoutedMLP(self.build, layer.experts, stacked_as=STACKED)
