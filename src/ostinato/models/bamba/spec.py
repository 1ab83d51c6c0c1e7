"""Bamba: a Mamba-2 mixer or attention, then a gated MLP, in every layer."""

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
from ostinato.plan.model import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec, RopeSpec
from ostinato.plan.rope import parse_rope

ROTATED_PART = 0.5
"""Of each attention head; the architecture fixes it, and config.json need not say so."""


@dataclass(frozen=True)
class BambaHyperparameters:
    """What models/bamba/model.py builds from."""

    kinds: tuple[str, ...]
    attention: AttentionSpec
    mamba2: Mamba2Spec
    intermediate_size: int
    attention_bias: bool
    mlp_bias: bool
    mamba_proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `bamba` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    num_heads = integer(config, "num_attention_heads")
    hyper = BambaHyperparameters(
        kinds=_kinds(config),
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer(config, "head_dim", hidden_size // num_heads),
        ),
        mamba2=expanded_mamba2_spec(config),
        intermediate_size=integer(config, "intermediate_size"),
        attention_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        mamba_proj_bias=flag(config, "mamba_proj_bias", False),
        conv_bias=flag(config, "mamba_conv_bias", True),
        dt_limit=time_step_limit(config),
        norm_eps=number(config, "rms_norm_eps", 1e-5),
    )
    tied = flag(config, "tie_word_embeddings", False)
    has_attention = "attention" in hyper.kinds
    ops = {"embedding", "linear", "rms_norm"}
    if has_attention:
        ops |= {"attention", "rotary", "rotary_angles"}
    if "mamba2" in hyper.kinds:
        ops |= {"causal_conv1d", "gated_rms_norm", "ssd_scan", "state_update"}
    return ModelSpec(
        architecture="bamba",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        tied_embeddings=tied,
        layers=tuple(_layer(kind, hyper, hidden_size) for kind in hyper.kinds),
        outer_parameters=vocab_size * hidden_size * (1 if tied else 2) + hidden_size,
        ssm_state_dtype=config.get("mamba_ssm_cache_dtype"),
        rope=_rope(config, hyper.attention.head_dim) if has_attention else None,
        ops=tuple(sorted(ops)),
        hyperparameters=hyper,
    )


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    count = integer(config, "num_hidden_layers")
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(index in range(count) for index in indices):
        raise ModelError(
            f"config.json has attn_layer_indices = {indices!r}, which should be a list of layers from 0 to {count - 1}"
        )
    return tuple("attention" if i in indices else "mamba2" for i in range(count))


def _rope(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Half of each head is rotated. Configs on the hub may say so in `attn_rotary_emb`, in elements."""
    rope = parse_rope(config, head_dim, ROTATED_PART)
    expected = int(head_dim * ROTATED_PART)
    for rotated in (rope.rotary_dim, integer(config, "attn_rotary_emb", expected)):
        if rotated != expected:
            raise ModelError(
                f"config.json rotates {rotated} elements of heads of {head_dim}; "
                f"a bamba model rotates half of them, {expected}"
            )
    return rope


def _layer(kind: str, hyper: BambaHyperparameters, hidden_size: int) -> LayerSpec:
    parameters = mlp_parameters(hidden_size, hyper.intermediate_size, bias=hyper.mlp_bias) + 2 * hidden_size
    mlp_width = 3 * hyper.intermediate_size
    mlp = mlp_linears(hidden_size, hyper.intermediate_size, "feed_forward")
    if kind == "attention":
        attention = hyper.attention
        parameters += attention_parameters(hidden_size, attention, hyper.attention_bias)
        width = 2 * attention.num_heads * attention.head_dim + attention.kv_elements_per_token
        linears = attention_linears(hidden_size, attention, "self_attn") + mlp
        return LayerSpec(kind, attention, None, parameters, 0, max(width, mlp_width), linears=linears)
    spec = hyper.mamba2
    mixer, float32 = mamba2_parameters(
        hidden_size, spec, proj_bias=hyper.mamba_proj_bias, conv_bias=hyper.conv_bias, norm=True
    )
    width = spec.in_proj_size + spec.conv_dim + 2 * spec.intermediate_size
    linears = mamba2_linears(hidden_size, spec, "mamba") + mlp
    return LayerSpec(kind, None, spec, parameters + mixer, float32, max(width, mlp_width), linears=linears)
