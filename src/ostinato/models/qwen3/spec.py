"""Qwen3: attention with normed queries and keys, and a gated MLP, in every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    number,
    parse_rope,
    qwen_windows,
    shared_fields,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class Qwen3Hyperparameters:
    """Hyperparameters of models/qwen3/model.py, besides the layers."""

    intermediate_size: int
    attention_bias: bool
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    attention = attention_spec(config, 128)
    return ModelSpec(
        architecture="qwen3",
        **shared_fields(config),
        layers=tuple(LayerSpec("attention", replace(attention, window=window)) for window in qwen_windows(config)),
        rope=parse_rope(config, attention.head_dim),
        sharded_dims=("intermediate_size",),
        hyperparameters=hyperparameters(config),
    )


def hyperparameters(config: JsonMapping) -> Qwen3Hyperparameters:
    """Return the hyperparameters of the layers."""
    return Qwen3Hyperparameters(
        intermediate_size=integer(config, "intermediate_size"),
        attention_bias=flag(config, "attention_bias", False),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
    )
