"""Qwen3 with experts in every `decoder_sparse_step`-th layer, except `mlp_only_layers`."""

from __future__ import annotations

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import flag, integer, sparse_layers, usual_experts
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.layer_specs import ExpertsSpec
from ostinato.plan.model import ModelSpec

WINDOW = 4096


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_moe` config.json. Either all layers have its window, or none has."""
    num_layers, has_windows = integer(config, "num_hidden_layers"), flag(config, "use_sliding_window", False)
    has_windows = has_windows and config.get("sliding_window", WINDOW) is not None
    bias = flag(config, "attention_bias", False)
    return llama_spec(
        config,
        "qwen3_moe",
        qkv_bias=bias,
        slides=(True,) * num_layers if has_windows else None,
        default_window=WINDOW,
        experts=[qwen_experts(config) if is_sparse else None for is_sparse in sparse_layers(config, num_layers)],
        qk_norms="of_heads",
        normalizes=flag(config, "norm_topk_prob", False),
    )


def qwen_experts(config: JsonMapping) -> ExpertsSpec:
    """Return the experts of a layer, whose number has two spellings."""
    name = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    return usual_experts(config, integer(config, name), width="moe_intermediate_size")
