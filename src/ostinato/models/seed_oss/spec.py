"""Seed-OSS: Llama with biases of queries, keys and values, and others by config.json."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `seed_oss` config.json."""
    return llama_spec(
        config,
        "seed_oss",
        qkv_bias=flag(config, "attention_bias", True),
        out_bias=flag(config, "attention_out_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        head_dim=128,
    )
