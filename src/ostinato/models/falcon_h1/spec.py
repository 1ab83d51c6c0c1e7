"""Falcon-H1: attention and a Mamba-2 mixer side by side, then a gated MLP, all with multipliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.checkpoint import checkpoint_dtype
from ostinato.models.hyperparameters import (
    activation,
    attention_linears,
    attention_parameters,
    expanded_mamba2_spec,
    flag,
    integer,
    mamba2_linears,
    mamba2_parameters,
    mlp_linears,
    mlp_parameters,
    number,
    time_step_limit,
)
from ostinato.plan.model import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec
from ostinato.plan.rope import parse_rope


@dataclass(frozen=True)
class Multipliers:
    """What scales the activations; weights are stored without them."""

    embedding: float
    logits: float
    key: float
    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    """Of the mixer's projected input: gate, x, B, C and time step."""
    mlp_gate: float
    mlp_down: float


@dataclass(frozen=True)
class FalconH1Hyperparameters:
    """What models/falcon_h1/model.py builds from."""

    attention: AttentionSpec
    mamba2: Mamba2Spec
    multipliers: Multipliers
    intermediate_size: int
    attention_bias: bool
    mlp_bias: bool
    mamba_in_bias: bool
    mamba_out_bias: bool
    conv_bias: bool
    mamba_norm: bool
    mamba_norm_before_gate: bool
    dt_limit: tuple[float, float]
    norm_eps: float


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `falcon_h1` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    hyper = _hyperparameters(config, hidden_size)
    tied = flag(config, "tie_word_embeddings", False)
    return ModelSpec(
        architecture="falcon_h1",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        tied_embeddings=tied,
        layers=(_layer(hyper, hidden_size),) * integer(config, "num_hidden_layers"),
        outer_parameters=vocab_size * hidden_size * (1 if tied else 2) + hidden_size,
        ssm_state_dtype=config.get("mamba_ssm_cache_dtype"),
        rope=parse_rope(config, hyper.attention.head_dim),
        ops=(
            "attention",
            "causal_conv1d",
            "embedding",
            "gated_rms_norm",
            "linear",
            "rms_norm",
            "rotary",
            "rotary_angles",
            "ssd_scan",
            "state_update",
        ),
        hyperparameters=hyper,
    )


def _hyperparameters(config: dict[str, Any], hidden_size: int) -> FalconH1Hyperparameters:
    num_heads = integer(config, "num_attention_heads")
    # A null means mamba_expand times the hidden size, and an absent key does not.
    inner_size = None if config.get("mamba_d_ssm", 0) is None else integer(config, "mamba_d_ssm", 1024)
    return FalconH1Hyperparameters(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer(config, "head_dim", hidden_size // num_heads),
        ),
        mamba2=expanded_mamba2_spec(config, inner_size),
        multipliers=_multipliers(config),
        intermediate_size=integer(config, "intermediate_size"),
        attention_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        mamba_in_bias=flag(config, "mamba_proj_bias", False),
        mamba_out_bias=flag(config, "projectors_bias", False),
        conv_bias=flag(config, "mamba_conv_bias", True),
        mamba_norm=flag(config, "mamba_rms_norm", False),
        mamba_norm_before_gate=flag(config, "mamba_norm_before_gate", True),
        dt_limit=time_step_limit(config),
        norm_eps=number(config, "rms_norm_eps", 1e-5),
    )


def _multipliers(config: dict[str, Any]) -> Multipliers:
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


def _numbers(config: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """`count` multipliers, 1 each where config.json has none."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"config.json has {name} = {values!r}, which should be a list of {count} numbers")
    return tuple(number({name: value}, name) for value in values)


def _layer(hyper: FalconH1Hyperparameters, hidden_size: int) -> LayerSpec:
    attention, mamba2 = hyper.attention, hyper.mamba2
    mixer, float32 = mamba2_parameters(
        hidden_size,
        mamba2,
        proj_bias=hyper.mamba_in_bias,
        conv_bias=hyper.conv_bias,
        norm=hyper.mamba_norm,
        out_bias=hyper.mamba_out_bias,
    )
    parameters = mixer + attention_parameters(hidden_size, attention, hyper.attention_bias)
    parameters += mlp_parameters(hidden_size, hyper.intermediate_size, bias=hyper.mlp_bias) + 2 * hidden_size
    mixer_width = mamba2.in_proj_size + mamba2.conv_dim + 2 * mamba2.intermediate_size
    attention_width = 2 * attention.num_heads * attention.head_dim + attention.kv_elements_per_token
    # The mixer's result waits while attention runs, and both read a scaled copy of the normed input.
    width = 2 * hidden_size + max(mixer_width, attention_width)
    linears = attention_linears(hidden_size, attention, "self_attn") + mamba2_linears(hidden_size, mamba2, "mamba")
    linears += mlp_linears(hidden_size, hyper.intermediate_size, "feed_forward")
    width = max(width, 3 * hyper.intermediate_size)
    return LayerSpec("hybrid", attention, mamba2, parameters, float32, width, linears=linears)
