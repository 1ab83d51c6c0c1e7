"""Qwen3.5 with images (model_types `qwen3_5`, `qwen3_5_moe`): its text model's blocks after Qwen3-VL's encoder."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.layers.module import ModelBuilder
from ostinato.models.decoder import Block
from ostinato.models.qwen3_5_text.head import AttentionHead, qwen35_head
from ostinato.models.qwen3_5_text.model import qwen35_block
from ostinato.models.qwen3_next.model import sparse_block
from ostinato.models.qwen3_vl.model import Qwen3VL
from ostinato.ops.step_inputs import Array, LayerCache, StepInputs
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


class Qwen35VL(Qwen3VL):
    """Language model with its encoder, and with its prediction head if that makes drafts."""

    norm_plus_one = True

    def __init__(self, build: ModelBuilder, spec: ModelSpec) -> None:
        super().__init__(build, spec)
        self.mtp: AttentionHead | None = None
        if spec.drafter is not None and spec.drafter.method == "mtp":
            eps = spec.hyperparameters.text.norm_eps
            self.mtp = qwen35_head(build, spec, spec.drafter.layers, self.make_block, eps)

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        hyper = self.spec.hyperparameters.text
        return qwen35_block(self.build, self.spec.hidden_size, layer, hyper, first_key=first_key)

    @property
    def head(self) -> AttentionHead | None:
        return self.mtp

    def forward(self, inputs: StepInputs, memory: Sequence[LayerCache]) -> Array:
        """Compute one step; `memory` is that of the layers, of the head's layers, and of the encoder's outputs."""
        text = self.model.language_model
        num_layers = len(text.layers)
        hidden = text(inputs, (*memory[:num_layers], memory[-1]))
        if self.mtp is not None:
            self.mtp.update_head_cache(hidden, text.embed(inputs, memory), inputs, memory[num_layers:-1])
        return hidden

    def checkpoint_name(self, name: str) -> str | None:
        """Translate a name; return None for tensors of a prediction head that is not used."""
        if name.startswith("mtp."):
            return None if self.mtp is None else name
        return super().checkpoint_name(name)


class Qwen35MoeVL(Qwen35VL):
    """A `Qwen35VL` with experts."""

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        return sparse_block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters.text, first_key)
