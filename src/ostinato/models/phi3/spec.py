"""Phi-3 and Phi-4: Llama with packed projections, in part rotated heads, a window in every layer, and LongRoPE."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer, with_defaults
from ostinato.models.llama.spec import llama_spec
from ostinato.plan.model import ModelSpec

OLD_NAMES = ("su", "yarn")
"""Names of the rope type `longrope` in older config.json files."""
LONGEST = 4096
"""`max_position_embeddings` and `original_max_position_embeddings` of a config.json without them."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `phi3` config.json."""
    config = with_defaults(config, max_position_embeddings=LONGEST, original_max_position_embeddings=LONGEST)
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    for name in ("type", "rope_type"):
        if scaling.get(name) in OLD_NAMES:
            scaling[name] = "longrope"
    return llama_spec(
        {**config, "rope_scaling": scaling or None, "layer_types": None},
        "phi3",
        default_eps=1e-5,
        default_partial=1.0,
        slides=(config.get("sliding_window") is not None,) * integer(config, "num_hidden_layers"),
        has_packed_tensors=True,
    )
