"""Granite with experts: Granite 4 without state layers and shared MLPs."""

from __future__ import annotations

from dataclasses import replace

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer
from ostinato.models.granitemoehybrid import spec as granite4
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granitemoe` config.json."""
    without = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1, "shared_intermediate_size": 0}
    layers = {"layer_types": ["attention"] * integer(config, "num_hidden_layers"), "position_embedding_type": "rope"}
    return replace(granite4.model_spec({**config, **layers, **without}), architecture="granitemoe")
