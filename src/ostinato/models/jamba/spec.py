"""Jamba: a Mamba-1 mixer or attention without positions, then a gated MLP or experts, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    number,
    respelled,
    shared_fields,
    usual_experts,
)
from ostinato.models.mamba.spec import time_step_rank
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.mixers import Mamba1Spec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class JambaHyperparameters:
    """Hyperparameters of models/jamba/model.py, besides the layers."""

    intermediate_size: int
    mamba_proj_bias: bool
    conv_bias: bool
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `jamba` config.json."""
    config = respelled(config, {"num_local_experts": "num_experts"})
    activation(config, "hidden_act", "silu", ("silu",))
    if not flag(config, "mamba_inner_layernorms", True):
        raise ModelError("config.json has mamba_inner_layernorms = false; supported: true, norms within the mixers")
    if config.get("sliding_window") is not None:
        raise ModelError(f"config.json has sliding_window = {config['sliding_window']!r}; supported: null, no window")
    count = integer(config, "num_hidden_layers")
    attends = _every(config, "attn_layer", period=8, offset=4)
    has_experts = _every(config, "expert_layer", period=2, offset=1)
    attention, mixer, experts = attention_spec(config), _mixer(config), _experts(config)
    layers = tuple(
        LayerSpec(
            "attention" if attends(i) else "mamba1",
            attention=attention if attends(i) else None,
            mixer=None if attends(i) else mixer,
            experts=experts if has_experts(i) else None,
        )
        for i in range(count)
    )
    return ModelSpec(
        architecture="jamba",
        **shared_fields(config),
        layers=layers,
        rope=None,
        sharded_dims=("intermediate_size",),
        hyperparameters=JambaHyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            mamba_proj_bias=flag(config, "mamba_proj_bias", False),
            conv_bias=flag(config, "mamba_conv_bias", True),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        ),
    )


def _every(config: JsonObject, name: str, period: int, offset: int) -> Any:
    """Return a predicate of layers that come once in `{name}_period`, the first of them at `{name}_offset`."""
    period = integer(config, f"{name}_period", period)
    offset = integer(config, f"{name}_offset", offset)
    if offset >= period:
        raise ModelError(f"config.json has {name}_offset = {offset}, which should be below {name}_period = {period}")
    return lambda i: i % period == offset


def _mixer(config: JsonObject) -> Mamba1Spec:
    return Mamba1Spec(
        channels=integer(config, "mamba_expand", 2) * integer(config, "hidden_size"),
        state_size=integer(config, "mamba_d_state", 16),
        conv_kernel=integer(config, "mamba_d_conv", 4),
        time_step_rank=time_step_rank(config, "mamba_dt_rank"),
    )


def _experts(config: JsonObject) -> ExpertsSpec | None:
    """Return the experts of a layer; with a single expert, a layer has an MLP for all tokens."""
    num_experts = integer(config, "num_experts", 16)
    return usual_experts(config, num_experts, 2) if num_experts > 1 else None
