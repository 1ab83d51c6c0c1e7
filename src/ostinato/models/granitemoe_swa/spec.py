"""Granite with windows and experts: the layers of `granite_swa`, with experts in place of the MLP."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import integer, usual_experts
from ostinato.models.granite_swa.spec import granite_swa_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granitemoe_swa` config.json."""
    experts = usual_experts(config, integer(config, "num_local_experts", 8), 2)
    return granite_swa_spec(config, "granitemoe_swa", norm_eps=1e-6, default_tied=False, experts=experts)
