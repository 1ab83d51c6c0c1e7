"""Qwen3-VL with experts: as `qwen3_vl`, with a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.hyperparameters import expert_linears, flag, integer, linear_parameters, mlp_parameters
from ostinato.models.qwen3.spec import Qwen3Hyperparameters, attention_part, dense_layer, hyperparameters
from ostinato.models.qwen3_vl.spec import Qwen3VLHyperparameters, part, vl_spec
from ostinato.plan.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class MoeHyperparameters:
    """The experts of the `layers` that have them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Qwen3VLMoeHyperparameters(Qwen3VLHyperparameters):
    """What models/qwen3_vl_moe/model.py builds from, beside the VisionSpec."""

    moe: MoeHyperparameters


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `qwen3_vl_moe` config.json."""
    text = part(config, "text_config")
    hidden_size, num_layers = integer(text, "hidden_size"), integer(text, "num_hidden_layers")
    hyper = hyperparameters(text, hidden_size // max(1, integer(text, "num_attention_heads")))
    moe = _moe(text, num_layers)
    dense, sparse = dense_layer(hyper, hidden_size), _sparse_layer(hyper, moe, hidden_size)
    layers = tuple(sparse if i in moe.layers else dense for i in range(num_layers))
    spec = vl_spec(config, "qwen3_vl_moe", hyper, layers, ("moe", "route") if moe.layers else ())
    return replace(spec, hyperparameters=Qwen3VLMoeHyperparameters(**vars(spec.hyperparameters), moe=moe))


def _moe(text: Mapping[str, Any], num_layers: int) -> MoeHyperparameters:
    """Experts are in every `decoder_sparse_step`-th layer, but for those that `mlp_only_layers` names."""
    if not flag(text, "norm_topk_prob", True):
        raise ModelError("config.json has norm_topk_prob = false; supported: true")
    num_experts = integer(text, "num_local_experts" if text.get("num_local_experts") is not None else "num_experts")
    top_k, step = integer(text, "num_experts_per_tok"), integer(text, "decoder_sparse_step", 1)
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"config.json has num_experts_per_tok = {top_k}, which should be 1 to {num_experts}")
    if step < 1:
        raise ModelError("config.json has decoder_sparse_step = 0, which should be at least 1")
    others = text.get("mlp_only_layers") or ()
    layers = tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in others)
    return MoeHyperparameters(num_experts, top_k, integer(text, "moe_intermediate_size"), layers)


def _sparse_layer(hyper: Qwen3Hyperparameters, moe: MoeHyperparameters, hidden_size: int) -> LayerSpec:
    layer = attention_part(hyper, hidden_size)
    expert = mlp_parameters(hidden_size, moe.intermediate_size)
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return replace(
        layer,
        parameters=layer.parameters + moe.num_experts * expert + linear_parameters(hidden_size, moe.num_experts),
        activation_elements=max(layer.activation_elements, moe.num_experts),
        inactive_parameters=(moe.num_experts - moe.top_k) * expert,
        experts=expert_linears(hidden_size, moe.intermediate_size, moe.num_experts, names, stacked=True),
    )
