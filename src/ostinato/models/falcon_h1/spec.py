"""Falcon-H1: attention and a Mamba-2 mixer side by side, then a gated MLP, all with multipliers."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.bamba.spec import HybridHyperparameters, expanded_mamba2_spec, hybrid_fields
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    number,
    parse_rope,
    shared_fields,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class Multipliers:
    """Multipliers of the activations; weights are stored without them."""

    embedding: float
    logits: float
    key: float
    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    """Multipliers of the mixer's projected input: gate, x, B, C and time step."""
    mlp_gate: float
    mlp_down: float


@dataclass(frozen=True)
class FalconH1Hyperparameters(HybridHyperparameters):
    """Hyperparameters of models/falcon_h1/model.py, besides the layers."""

    multipliers: Multipliers
    intermediate_size: int
    mlp_bias: bool
    mamba_out_bias: bool
    mamba_norm: bool
    mamba_norm_before_gate: bool


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `falcon_h1` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    # A null means mamba_expand times the hidden size, and an absent key does not.
    inner_size = None if config.get("mamba_d_ssm", 0) is None else integer(config, "mamba_d_ssm", 1024)
    attention, mamba2 = attention_spec(config), expanded_mamba2_spec(config, inner_size)
    return ModelSpec(
        architecture="falcon_h1",
        **shared_fields(config),
        layers=(LayerSpec("hybrid", attention, mamba2),) * integer(config, "num_hidden_layers"),
        rope=parse_rope(config, attention.head_dim),
        sharded_dims=("intermediate_size",),
        hyperparameters=_hyperparameters(config),
    )


def _hyperparameters(config: JsonObject) -> FalconH1Hyperparameters:
    return FalconH1Hyperparameters(
        multipliers=_multipliers(config),
        intermediate_size=integer(config, "intermediate_size"),
        **hybrid_fields(config, norm_eps=1e-5),
        mlp_bias=flag(config, "mlp_bias", False),
        mamba_out_bias=flag(config, "projectors_bias", False),
        mamba_norm=flag(config, "mamba_rms_norm", False),
        mamba_norm_before_gate=flag(config, "mamba_norm_before_gate", True),
    )


def _multipliers(config: JsonObject) -> Multipliers:
    mlp_gate, mlp_down = _numbers(config, "mlp_multipliers", 2)
    return Multipliers(
        embedding=number(config, "embedding_multiplier", 1.0),
        logits=number(config, "lm_head_multiplier", 1.0),
        key=number(config, "key_multiplier", 1.0),
        attention_in=number(config, "attention_in_multiplier", 1.0),
        attention_out=number(config, "attention_out_multiplier", 1.0),
        ssm_in=number(config, "ssm_in_multiplier", 1.0),
        ssm_out=number(config, "ssm_out_multiplier", 1.0),
        ssm=_numbers(config, "ssm_multipliers", 5),
        mlp_gate=mlp_gate,
        mlp_down=mlp_down,
    )


def _numbers(config: JsonObject, name: str, count: int) -> tuple[float, ...]:
    """Return `count` multipliers, 1 each if config.json has none."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"config.json has {name} = {values!r}, which should be a list of {count} numbers")
    return tuple(number({name: value}, name) for value in values)
