"""Mellum 2: Qwen3 with experts, and layers with a window, which have a rotary embedding of their own."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import FULL, flag, integer, layer_kinds, sliding_layers
from ostinato.models.llama.spec import llama_spec
from ostinato.models.qwen3_moe.spec import qwen_experts
from ostinato.plan.model import ModelSpec

THETA, LOCAL_THETA, WINDOW = 500_000.0, 10_000.0, 1024
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mellum` config.json. Its prediction head, if any, is not read."""
    # Rotary embeddings are read in their newer spelling alone.
    config = {name: value for name, value in config.items() if name not in ("rope_theta", "partial_rotary_factor")}
    num_layers = integer(config, "num_hidden_layers")
    slides = sliding_layers({"layer_types": [FULL] * num_layers, **config}, 1)
    kinds = layer_kinds(config, {"dense": "", "sparse": "experts"}, ("mlp_layer_types",)) or ("experts",) * num_layers
    experts, bias = qwen_experts(config), flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "mellum",
        qkv_bias=bias,
        head_dim=128,
        default_theta=THETA,
        local_theta=LOCAL_THETA,
        default_partial=1.0,
        slides=slides,
        default_window=WINDOW,
        experts=[experts if kind else None for kind in kinds],
        unread="mtp.",
        qk_norms="of_heads",
        normalizes=flag(config, "norm_topk_prob", True),
    )
