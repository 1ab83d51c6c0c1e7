"""Qwen3-VL with experts: `qwen3_vl` with a mixture of experts in most layers."""

from __future__ import annotations

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import attention_spec, flag, integer, top_k
from ostinato.models.qwen3.spec import hyperparameters
from ostinato.models.qwen3_vl.spec import part, vl_spec
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_vl_moe` config.json."""
    text = part(config, "text_config")
    num_layers, attention, hyper = integer(text, "num_hidden_layers"), attention_spec(text), hyperparameters(text)
    experts, sparse_layers = _experts(text, num_layers)
    dense = LayerSpec("attention", attention)
    sparse = LayerSpec("attention", attention, None, experts)
    layers = tuple(sparse if i in sparse_layers else dense for i in range(num_layers))
    return vl_spec(config, "qwen3_vl_moe", hyper, layers)


def _experts(text: JsonMapping, num_layers: int) -> tuple[ExpertsSpec, tuple[int, ...]]:
    """Return the experts of a layer, and the layers that have them.

    They are every `decoder_sparse_step`-th layer, except those that `mlp_only_layers` names.
    """
    if not flag(text, "norm_topk_prob", True):
        raise ModelError("config.json has norm_topk_prob = false; supported: true")
    num_experts = integer(text, "num_local_experts" if text.get("num_local_experts") is not None else "num_experts")
    chosen, step = top_k(text, num_experts), integer(text, "decoder_sparse_step", 1)
    if step < 1:
        raise ModelError("config.json has decoder_sparse_step = 0, which should be at least 1")
    others = text.get("mlp_only_layers") or ()
    layers = tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in others)
    return ExpertsSpec(
        num_experts, chosen, integer(text, "hidden_size"), integer(text, "moe_intermediate_size")
    ), layers
