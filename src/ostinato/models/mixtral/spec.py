"""Mixtral: Mistral with experts in every layer (arXiv 2401.04088)."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer, layer_windows, respelled, top_k
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.layer_specs import ExpertsSpec
from ostinato.plan.model import ModelSpec

THETA, LONGEST = 1_000_000.0, 131072
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mixtral` config.json."""
    config = respelled(config, {"num_experts": "num_local_experts"})
    config = {**config, "max_position_embeddings": integer(config, "max_position_embeddings", LONGEST)}
    num_layers, num_experts = integer(config, "num_hidden_layers"), integer(config, "num_local_experts", 8)
    chosen, size = top_k(config, num_experts, 2), integer(config, "hidden_size")
    experts = ExpertsSpec(num_experts, chosen, size, integer(config, "intermediate_size"))
    return llama_spec(
        config,
        "mixtral",
        default_theta=THETA,
        default_eps=1e-5,
        windows=layer_windows(config, (config.get("sliding_window") is not None,) * num_layers, None),
        experts=(experts,) * num_layers,
        experts_in="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    )
