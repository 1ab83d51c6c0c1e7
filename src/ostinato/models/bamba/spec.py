"""Bamba: a Mamba-2 mixer or attention, then a gated MLP, in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import (
    HybridHyperparameters,
    activation,
    attention_spec,
    expanded_mamba2_spec,
    flag,
    hybrid_fields,
    integer,
    parse_rope,
    shared_fields,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

ROTATED_PART = 0.5
"""Rotated part of each attention head; the architecture fixes it, and config.json need not give it."""


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
