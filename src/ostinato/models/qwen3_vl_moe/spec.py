"""Qwen3-VL with experts: `qwen3_vl` with a mixture of experts in most layers."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag_is, integer, sparse_layers
from ostinato.models.qwen3_moe.spec import qwen_experts
from ostinato.models.qwen3_vl.spec import qwen3_text, vl_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_vl_moe` config.json."""
    return vl_spec(config, "qwen3_vl_moe", _text_spec)


def _text_spec(text: JsonObject) -> ModelSpec:
    flag_is(text, "norm_topk_prob", True)
    experts, are_sparse = qwen_experts(text), sparse_layers(text, integer(text, "num_hidden_layers"))
    return qwen3_text(text, experts=[experts if is_sparse else None for is_sparse in are_sparse])
