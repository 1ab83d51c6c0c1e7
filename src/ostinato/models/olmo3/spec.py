"""OLMo 3: norms after attention and MLP, and layers with a window; scaled positions in the other ones alone.

As in transformers, `rope_theta` outside of `rope_parameters` is the other ones' too.
"""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, sliding_layers
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

THETA, WINDOW, PATTERN = 500_000.0, 4096, 4
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `olmo3` config.json."""
    bias, slides = flag(config, "attention_bias", False), sliding_layers(config, PATTERN)
    return llama_spec(
        config,
        "olmo3",
        qkv_bias=bias,
        default_theta=THETA,
        default_eps=1e-5,
        local_theta=THETA,
        slides=slides,
        default_window=WINDOW,
        qk_norms="of_all",
        norms_results=True,
    )
