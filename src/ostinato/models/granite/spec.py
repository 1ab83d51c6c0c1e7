"""Granite: Llama with four multipliers."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, number
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granite` config.json."""
    bias = flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "granite",
        qkv_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_multiplier=number(config, "attention_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_multiplier=1.0 / number(config, "logits_scaling", 1.0),
    )
