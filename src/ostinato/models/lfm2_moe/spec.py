"""LFM2 with experts: a short convolution or attention, then a gated MLP in the first layers, or experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import flag, integer, number, usual_experts
from ostinato.models.lfm2.spec import Lfm2Hyperparameters, lfm2_spec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class Lfm2MoeHyperparameters(Lfm2Hyperparameters):
    """Hyperparameters of models/lfm2/model.py, besides the layers."""

    has_expert_bias: bool
    normalize: bool
    scaling: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `lfm2_moe` config.json."""
    if config.get("layer_types") is None:
        raise ModelError("config.json names no layer_types, which say where attention is")
    plain = lfm2_spec(config, "lfm2_moe", integer(config, "intermediate_size"))
    num_dense = integer(config, "num_dense_layers", 2)
    experts = usual_experts(config, integer(config, "num_experts"), width="moe_intermediate_size")
    layers = (replace(layer, experts=experts) if i >= num_dense else layer for i, layer in enumerate(plain.layers))
    hyper = Lfm2MoeHyperparameters(
        **vars(plain.hyperparameters),
        has_expert_bias=flag(config, "use_expert_bias", True),
        normalize=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )
    return replace(plain, layers=tuple(layers), hyperparameters=hyper)
