"""Mixtral: Mistral with experts in every layer (arXiv 2401.04088)."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer, respelled, usual_experts, with_defaults
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

THETA, LONGEST = 1_000_000.0, 131072
"""Defaults of a config.json without these values."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mixtral` config.json."""
    config = respelled(config, {"num_experts": "num_local_experts"})
    config = with_defaults(config, max_position_embeddings=LONGEST)
    num_layers = integer(config, "num_hidden_layers")
    experts = usual_experts(config, integer(config, "num_local_experts", 8), 2)
    return llama_spec(
        config,
        "mixtral",
        default_theta=THETA,
        default_eps=1e-5,
        slides=(config.get("sliding_window") is not None,) * num_layers,
        experts=(experts,) * num_layers,
        experts_in="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    )
