"""Qwen3-VL (model_type `qwen3_vl`): Qwen3's blocks, into which the outputs of a vision encoder are injected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ostinato.layers.build import Build
from ostinato.layers.linear import Embedding
from ostinato.layers.norm import RMSNorm
from ostinato.layers.rotary import AxialRotary
from ostinato.layers.step import EncoderInputs, LayerMemory, StepInputs
from ostinato.layers.vision import VisionEncoder
from ostinato.models.base import CausalLM
from ostinato.models.qwen3.model import Block
from ostinato.models.qwen3_vl.spec import Qwen3VLHyperparameters
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import axes, inverse_frequencies


class TextBackbone(nn.Module):
    """Embedding, layers and final norm. Behind the embedding and behind each of the first layers, tokens of images get
    a row of what the encoder gave for them."""

    def __init__(self, build: Build, spec: ModelSpec, blocks: Iterable[Block]) -> None:
        super().__init__()
        assert spec.rope is not None
        assert spec.vision is not None
        self.ops = build.ops
        self.hidden_rows = spec.vision.hidden_rows
        self.embed_tokens = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(build, spec.hidden_size, spec.hyperparameters.text.norm_eps)
        self.rotary = AxialRotary(build, axes(spec.rope), *inverse_frequencies(spec.rope))

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """-> [tokens, hidden]"""
        *layers, behind = memory
        cells, media = step.media_cells, behind.media
        x = self.ops.inject_media(self.embed_tokens(step.token_ids), cells, media, 0, False)
        angles = self.rotary(step.rope_positions)
        for i, (block, layer_memory) in enumerate(zip(self.layers, layers, strict=True)):
            x = block(x, angles, step, layer_memory)
            if i + 1 < self.hidden_rows:
                x = self.ops.inject_media(x, cells, media, i + 1, True)
        return self.norm(x)


class VLModel(nn.Module):
    """The encoder and the text part, under the checkpoint's names."""

    def __init__(self, build: Build, spec: ModelSpec, blocks: Iterable[Block]) -> None:
        super().__init__()
        assert spec.vision is not None
        hyper: Qwen3VLHyperparameters = spec.hyperparameters
        self.visual = VisionEncoder(build, spec.vision, hyper.theta, hyper.activation)
        self.language_model = TextBackbone(build, spec, blocks)


class Qwen3VL(CausalLM):
    """The language model with its encoder."""

    def __init__(self, build: Build, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.model = VLModel(build, spec, self._blocks(build, spec))

    def _blocks(self, build: Build, spec: ModelSpec) -> Iterable[Block]:
        return (Block(build, spec.hidden_size, spec.hyperparameters.text) for _ in spec.layers)

    @property
    def embedding(self) -> Embedding:
        return self.model.language_model.embed_tokens

    def forward(self, step: StepInputs, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """`memory` ends with that of the encoder's outputs; `step` says where tokens stand in time, height and width,
        and which outputs are theirs."""
        return self.model.language_model(step, memory)

    def encode(self, inputs: EncoderInputs) -> torch.Tensor:
        """-> [patches / merge ** 2, hidden_rows, hidden] in the model's dtype: what belongs into the cells of the
        output tokens, those of padding too, which may be anything."""
        return self.model.visual(inputs)
