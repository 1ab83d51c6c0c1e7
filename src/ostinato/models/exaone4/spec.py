"""EXAONE 4: norms after attention and MLP; layers with a window, or without positions. Small ones have positions."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import sliding_layers
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

WINDOW, PATTERN = 4096, 4
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `exaone4` config.json. If it has no window, all layers have positions."""
    has_windows = config.get("sliding_window", WINDOW) is not None
    slides = sliding_layers(config, PATTERN if has_windows else 1)
    return llama_spec(
        config,
        "exaone4",
        default_eps=1e-5,
        rotates=slides if has_windows else None,
        slides=slides,
        default_window=WINDOW,
        qk_norms="of_heads",
        norms_results=True,
    )
