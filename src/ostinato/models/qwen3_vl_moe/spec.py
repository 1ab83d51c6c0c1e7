"""Qwen3-VL with experts: `qwen3_vl` with a mixture of experts in most layers."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import attention_spec, flag_is, integer, sparse_layers
from ostinato.models.qwen3.spec import hyperparameters
from ostinato.models.qwen3_moe.spec import qwen_experts
from ostinato.models.qwen3_vl.spec import part, vl_spec
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_vl_moe` config.json."""
    text = part(config, "text_config")
    flag_is(text, "norm_topk_prob", True)
    attention, experts = attention_spec(text), qwen_experts(text)
    layers = tuple(
        LayerSpec("attention", attention, None, experts if is_sparse else None)
        for is_sparse in sparse_layers(text, integer(text, "num_hidden_layers"))
    )
    return vl_spec(config, "qwen3_vl_moe", hyperparameters(text), layers)
