"""Qwen3: Llama with a norm for each query and key."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, qwen_windows
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3` config.json."""
    bias, windows = flag(config, "attention_bias", False), qwen_windows(config)
    return llama_spec(config, "qwen3", qkv_bias=bias, head_dim=128, windows=windows, qk_norms="of_heads")
