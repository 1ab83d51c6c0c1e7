"""Qwen3.5 with images (model_type `qwen3_5`): its text model's blocks behind Qwen3-VL's encoder."""

from __future__ import annotations

from ostinato.models.decoder import Block
from ostinato.models.qwen3_5_text.model import qwen35_block
from ostinato.models.qwen3_vl.model import Qwen3VL
from ostinato.plan.model import LayerSpec


class Qwen35VL(Qwen3VL):
    """The language model with its encoder."""

    norm_plus_one = True

    def make_block(self, layer: LayerSpec) -> Block:
        return qwen35_block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters.text)

    def checkpoint_name(self, name: str) -> str | None:
        """A prediction head does not draft beside images yet, and is not loaded."""
        return None if name.startswith("mtp.") else super().checkpoint_name(name)
