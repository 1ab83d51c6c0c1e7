"""Ernie 4.5: Llama whose heads have the rows that positions rotate together side by side."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `ernie4_5` config.json."""
    bias = flag(config, "use_bias", False)
    return llama_spec(
        config,
        "ernie4_5",
        qkv_bias=bias,
        mlp_bias=bias,
        head_dim=128,
        default_tied=True,
        default_theta=500_000.0,
        default_eps=1e-5,
        has_neighbours=True,
    )
