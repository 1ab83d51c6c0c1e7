"""Ministral 3: Mistral whose queries grow with the logarithm of their positions."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer, number, with_defaults
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

LONGEST = 262144
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary embedding of a config.json without one."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `ministral3` config.json."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or ROPE
    config = with_defaults(config, max_position_embeddings=LONGEST)
    beta = number(rope, "llama_4_scaling_beta", 0.0)
    return llama_spec(
        {**config, "rope_scaling": rope},
        "ministral3",
        head_dim=128,
        default_eps=1e-5,
        slides=(config.get("sliding_window") is not None,) * integer(config, "num_hidden_layers"),
        query_growth=(beta, integer(rope, "original_max_position_embeddings")) if beta else None,
    )
