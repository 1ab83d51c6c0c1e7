"""Cohere 2 (Command R7B, Command A): attention beside an MLP, and layers with a window or without positions."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, number, sliding_layers
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

WINDOW, PATTERN, EPS = 4096, 4, 1e-5
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `cohere2` config.json."""
    bias, slides = flag(config, "attention_bias", False), sliding_layers(config, PATTERN)
    return llama_spec(
        {**config, "rms_norm_eps": number(config, "layer_norm_eps", EPS)},
        "cohere2",
        qkv_bias=bias,
        default_tied=True,
        rotates=slides,
        slides=slides,
        default_window=WINDOW,
        has_neighbours=True,
        is_parallel=True,
        logits_multiplier=number(config, "logit_scale", 0.0625),
    )
