"""Bamba: a Mamba-2 mixer or attention, then a gated MLP, in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    number,
    parse_rope,
    shared_fields,
    time_step_limit,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

ROTATED_PART = 0.5
"""Rotated part of each attention head; the architecture fixes it, and config.json need not give it."""


@dataclass(frozen=True)
class HybridHyperparameters:
    """Hyperparameters of attention and mixers that Bamba, Granite and Falcon-H1 have in common."""

    attention_bias: bool
    mamba_proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float


@dataclass(frozen=True)
class BambaHyperparameters(HybridHyperparameters):
    """Hyperparameters of models/bamba/model.py, besides the layers."""

    intermediate_size: int
    mlp_bias: bool


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `bamba` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    kinds, attention, mamba2 = _kinds(config), attention_spec(config), expanded_mamba2_spec(config)
    hyper = BambaHyperparameters(
        **hybrid_fields(config, norm_eps=1e-5),
        intermediate_size=integer(config, "intermediate_size"),
        mlp_bias=flag(config, "mlp_bias", False),
    )
    layers = {"attention": LayerSpec("attention", attention), "mamba2": LayerSpec("mamba2", mixer=mamba2)}
    return ModelSpec(
        architecture="bamba",
        **shared_fields(config),
        layers=tuple(layers[kind] for kind in kinds),
        rope=_rope(config, attention.head_dim) if "attention" in kinds else None,
        sharded_dims=("intermediate_size",),
        hyperparameters=hyper,
    )


def _kinds(config: JsonObject) -> tuple[str, ...]:
    count = integer(config, "num_hidden_layers")
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(index in range(count) for index in indices):
        raise ModelError(
            f"config.json has attn_layer_indices = {indices!r}, which should be a list of layers from 0 to {count - 1}"
        )
    return tuple("attention" if i in indices else "mamba2" for i in range(count))


def _rope(config: JsonObject, head_dim: int) -> RopeSpec:
    """Return the rotary embedding, which rotates half of each head.

    Configs on the hub may give that in `attn_rotary_emb`, in elements.
    """
    rope = parse_rope(config, head_dim, ROTATED_PART)
    expected = int(head_dim * ROTATED_PART)
    for rotated in (rope.rotary_dim, integer(config, "attn_rotary_emb", expected)):
        if rotated != expected:
            raise ModelError(
                f"config.json rotates {rotated} elements of heads of {head_dim}; "
                f"a bamba model rotates half of them, {expected}"
            )
    return rope


def hybrid_fields(config: JsonMapping, norm_eps: float) -> JsonObject:
    """Return the fields of HybridHyperparameters; `norm_eps` is the default for a config.json without one."""
    return {
        "attention_bias": flag(config, "attention_bias", False),
        "mamba_proj_bias": flag(config, "mamba_proj_bias", False),
        "conv_bias": flag(config, "mamba_conv_bias", True),
        "dt_limit": time_step_limit(config),
        "norm_eps": number(config, "rms_norm_eps", norm_eps),
    }


def expanded_mamba2_spec(config: JsonMapping, inner_size: int | None = None) -> Mamba2Spec:
    """Return the mixer from the `mamba_*` keys of Bamba, Granite and Falcon-H1.

    `inner_size` is Falcon-H1's `mamba_d_ssm`; without it, `mamba_expand` times the hidden size. ModelError if heads and
    head size do not multiply to it.
    """
    name = "mamba_d_ssm"
    if inner_size is None:
        name = "mamba_expand * hidden_size"
        inner_size = integer(config, "mamba_expand", 2) * integer(config, "hidden_size")
    num_heads = integer(config, "mamba_n_heads", 128)
    automatic = config.get("mamba_d_head") in (None, "auto")
    head_dim = inner_size // max(num_heads, 1) if automatic else integer(config, "mamba_d_head")
    if num_heads * head_dim != inner_size:
        raise ModelError(
            f"config.json has mamba_n_heads = {num_heads} and mamba_d_head = {config.get('mamba_d_head')!r}; "
            f"their product should be {name} = {inner_size}"
        )
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=integer(config, "mamba_d_state", 256),
        num_groups=integer(config, "mamba_n_groups", 1),
        conv_kernel=integer(config, "mamba_d_conv", 4),
        chunk_size=integer(config, "mamba_chunk_size", 256),
    )
