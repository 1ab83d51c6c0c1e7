"""Falcon-Mamba: Mamba with RMS norms without weights of time steps, B and C."""

from __future__ import annotations

from ostinato.json_io import JsonObject
from ostinato.models.config_json import number
from ostinato.models.mamba.spec import selective_model_spec
from ostinato.plan.model import ModelSpec


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `falcon_mamba` config.json."""
    return selective_model_spec(config, "falcon_mamba", inner_norm_eps=number(config, "mixer_rms_eps", 1e-6))
