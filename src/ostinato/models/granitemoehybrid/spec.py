"""Granite 4: a Mamba-2 mixer or attention, then a shared MLP, with experts or without, in every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.bamba.spec import HybridHyperparameters, expanded_mamba2_spec, hybrid_fields
from ostinato.models.config_json import (
    activation,
    attention_spec,
    integer,
    layer_kinds,
    number,
    parse_rope,
    shared_fields,
    usual_experts,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

KINDS = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention"}
POSITIONS = (None, "nope", "rope")
"""Values of `position_embedding_type`; the first two both mean attention without positions."""


@dataclass(frozen=True)
class GraniteMoeHybridHyperparameters(HybridHyperparameters):
    """Hyperparameters of models/granitemoehybrid/model.py, besides the layers."""

    shared_intermediate_size: int
    embedding_multiplier: float
    attention_multiplier: float
    """Scale of attention scores, in place of head_dim ** -0.5."""
    residual_multiplier: float
    logits_scaling: float
    """Divisor of the logits."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granitemoehybrid` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    kinds, count = _kinds(config), integer(config, "num_local_experts", 8)
    experts = usual_experts(config, count, 2) if count else None
    attention, mamba2 = attention_spec(config), expanded_mamba2_spec(config)
    rope = _rope(config, attention.head_dim) if "attention" in kinds else None
    layers = {
        "attention": LayerSpec("attention", attention, None, experts),
        "mamba2": LayerSpec("mamba2", None, mamba2, experts),
    }
    return ModelSpec(
        architecture="granitemoehybrid",
        **shared_fields(config),
        layers=tuple(layers[kind] for kind in kinds),
        rope=rope,
        sharded_dims=("shared_intermediate_size",),
        hyperparameters=_hyperparameters(config),
    )


def _hyperparameters(config: JsonObject) -> GraniteMoeHybridHyperparameters:
    return GraniteMoeHybridHyperparameters(
        shared_intermediate_size=integer(config, "shared_intermediate_size", 1024),
        **hybrid_fields(config, norm_eps=1e-6),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_multiplier=number(config, "attention_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_scaling=number(config, "logits_scaling", 1.0),
    )


def _kinds(config: JsonObject) -> tuple[str, ...]:
    """Return layer kinds, under either name of their list, in either spelling; without one, all are state layers."""
    kinds = layer_kinds(config, KINDS, ("layer_types", "layers_block_type"))
    return kinds or (KINDS["linear_attention"],) * integer(config, "num_hidden_layers")


def _rope(config: JsonObject, head_dim: int) -> RopeSpec | None:
    kind = config.get("position_embedding_type")
    if kind not in POSITIONS:
        known = ", ".join(repr(known) if known else "null" for known in POSITIONS)
        raise ModelError(f"config.json has position_embedding_type = {kind!r}; supported: {known}")
    if kind != "rope":
        return None
    return parse_rope(config, head_dim)


def granitemoe_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granitemoe` config.json: Granite with experts, without state layers and shared MLPs."""
    without = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1, "shared_intermediate_size": 0}
    layers = {"layer_types": ["attention"] * integer(config, "num_hidden_layers"), "position_embedding_type": "rope"}
    return replace(model_spec({**config, **layers, **without}), architecture="granitemoe")
