"""Qwen3.5 with experts and images (model_type `qwen3_5_moe`)."""

from __future__ import annotations

from ostinato.models.decoder import Block
from ostinato.models.qwen3_5.model import Qwen35VL
from ostinato.models.qwen3_next.model import sparse_block
from ostinato.plan.layer_specs import LayerSpec


class Qwen35MoeVL(Qwen35VL):
    """Language model with its encoder; a `Qwen35VL` with experts."""

    def make_block(self, layer: LayerSpec, first_key: int = 0) -> Block:
        return sparse_block(self.build, self.spec.hidden_size, layer, self.spec.hyperparameters.text, first_key)
