"""Qwen3.5 with images (model_types `qwen3_5`, `qwen3_5_moe`): its text model's blocks after Qwen3-VL's encoder."""

from __future__ import annotations

from ostinato.models.qwen3_5_text.model import Qwen35
from ostinato.models.qwen3_next.model import Qwen3Next
from ostinato.models.qwen3_vl.model import QwenVL


class Qwen35VL(QwenVL, Qwen35):
    """Language model with its encoder, and with its prediction head if that makes drafts."""


class Qwen35MoeVL(QwenVL, Qwen3Next):
    """A `Qwen35VL` with experts."""
