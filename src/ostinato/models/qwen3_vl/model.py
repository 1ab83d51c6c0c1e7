"""Qwen3-VL (model_types `qwen3_vl`, `qwen3_vl_moe`): Qwen3's blocks, with the outputs of an encoder of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostinato.layers.attention import AxialRotary
from ostinato.layers.mlp import RoutedMLP
from ostinato.layers.module import ModelBuilder, Module
from ostinato.layers.vision import VisionEncoder
from ostinato.models.base import Backbone, CausalLM
from ostinato.models.decoder import Block
from ostinato.models.qwen3.model import qwen3_block
from ostinato.models.qwen3_vl.spec import Qwen3VLHyperparameters
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec, VisionSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import axes, inverse_frequencies

STACKS = ("gate_up_proj", "down_proj")
"""Names of a layer's experts, which the checkpoint may store transposed."""


class TextBackbone(Backbone):
    """Backbone that injects the encoder's outputs into tokens of images after the embedding and the first layers."""

    def __init__(
        self, build: ModelBuilder, spec: ModelSpec, make_block: Callable[[LayerSpec], Module], norm_plus_one: bool
    ) -> None:
        super().__init__(build, spec, make_block, spec.hyperparameters.text.norm_eps, norm_plus_one=norm_plus_one)
        assert spec.rope is not None
        assert spec.vision is not None
        self.hidden_rows = spec.vision.hidden_rows
        self.axial_rotary = AxialRotary(build, axes(spec.rope), *inverse_frequencies(spec.rope))

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute the final normed hidden states of a step, [tokens, hidden]."""
        assert self.inject_media is not None, "the model has an encoder"
        *layers, behind = memory
        x = self.embed(inputs, memory)
        angles = self.axial_rotary(inputs.rope_positions)
        for i, (block, layer_memory) in enumerate(zip(self.layers, layers, strict=True)):
            x = block(x, angles, inputs, layer_memory)
            if i + 1 < self.hidden_rows:
                x = self.inject_media(x, inputs.media_cells, behind.media, i + 1, True)
        return self.norm(x)


class VLModel(Module):
    """Encoder and text part, under the checkpoint's names."""

    def __init__(
        self,
        build: ModelBuilder,
        spec: ModelSpec,
        encoder: Module,
        make_block: Callable[[LayerSpec], Module],
        norm_plus_one: bool,
    ) -> None:
        super().__init__()
        self.visual = encoder
        self.language_model = TextBackbone(build, spec, make_block, norm_plus_one)


class Qwen3VL(CausalLM):
    """Language model with its encoder."""

    norm_plus_one = False
    """True if the text part's last norm is stored less 1."""

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        assert spec.vision is not None
        self.model = VLModel(build, spec, self.make_encoder(spec.vision), self.make_block, self.norm_plus_one)

    def make_encoder(self, vision: VisionSpec) -> Module:
        """Make the encoder of images."""
        hyper: Qwen3VLHyperparameters = self.spec.hyperparameters
        return VisionEncoder(self.build, vision, hyper.theta, hyper.activation)

    def make_block(self, layer: LayerSpec) -> Block:
        return qwen3_block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters.text)

    @property
    def backbone(self) -> Backbone:
        return self.model.language_model

    @property
    def encoder(self) -> Module:
        return self.model.visual

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute one step -> final normed hidden states, [tokens, hidden].

        `memory` ends with that of the encoder's outputs; `inputs` has the tokens' positions in time, height and width,
        and their encoder outputs.
        """
        return self.model.language_model(inputs, memory)


class Qwen3VLMoe(Qwen3VL):
    """A `Qwen3VL` with experts."""

    transposable = tuple(f".experts.{name}" for name in STACKS)

    def make_block(self, layer: LayerSpec) -> Block:
        build, size = self.build, self.spec.hidden_size
        mlp = None if layer.experts is None else RoutedMLP(build, layer.experts, stacked_as=STACKS)
        return qwen3_block(build, size, layer, self.spec.hyperparameters.text, mlp)
