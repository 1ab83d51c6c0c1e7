"""Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import qwen_windows
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen2` config.json."""
    windows = qwen_windows(config)
    return llama_spec(config, "qwen2", qkv_bias=True, out_bias=False, windows=windows)
