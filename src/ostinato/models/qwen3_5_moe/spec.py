"""Qwen3.5 with experts and images: `qwen3_5` with experts and a shared one in every layer."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.qwen3_5.spec import around
from ostinato.models.qwen3_5_moe_text.spec import model_spec as text_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_5_moe` config.json."""
    return around(config, "qwen3_5_moe", text_spec)
