"""Granite with windows: layers with sinks, most with a window; four multipliers; a rotary base for each layer.

`granitemoe_swa` is the same with experts, and perhaps an MLP that all tokens share, in place of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    layer_windows,
    number,
    parse_rope,
    shared_fields,
    usual_experts,
)
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec

WINDOW, FULL_EVERY = 128, 4
"""Defaults: the window, and every which layer has none, the first one included."""


@dataclass(frozen=True)
class GraniteSwaHyperparameters:
    """Hyperparameters of models/granite_swa/model.py, besides the layers.

    `intermediate_size` is that of the MLP, the shared one if there are experts; 0: there is none.
    """

    intermediate_size: int
    attention_bias: bool
    mlp_bias: bool
    norm_eps: float
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granite_swa` config.json."""
    return _granite_spec(config, "granite_swa", norm_eps=1e-5, default_tied=True)


def granitemoe_swa_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `granitemoe_swa` config.json."""
    experts = usual_experts(config, integer(config, "num_local_experts", 8), 2)
    return _granite_spec(config, "granitemoe_swa", norm_eps=1e-6, default_tied=False, experts=experts)


def _granite_spec(
    config: JsonObject, architecture: str, *, norm_eps: float, default_tied: bool, experts: ExpertsSpec | None = None
) -> ModelSpec:
    """Return the spec of either architecture; `norm_eps` and `default_tied` are defaults for a config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    attention, num_layers = replace(attention_spec(config), has_sinks=True), integer(config, "num_hidden_layers")
    windows = layer_windows(config, [i % FULL_EVERY != 0 for i in range(num_layers)], WINDOW)
    rope = parse_rope(config, attention.head_dim)
    thetas = _thetas(config, rope.theta, num_layers)
    bases = sorted({theta for theta in thetas if theta})
    has_mlp = experts is None
    mlp_size = integer(config, "intermediate_size") if has_mlp else integer(config, "shared_intermediate_size", 0)
    attentions = (
        replace(attention, window=window, rotates=theta > 0, rope=bases.index(theta) if theta else 0)
        for window, theta in zip(windows, thetas, strict=True)
    )
    ropes = tuple(replace(rope, theta=theta) for theta in bases)
    return ModelSpec(
        architecture=architecture,
        **shared_fields(config, default_tied),
        layers=tuple(LayerSpec("attention", attention, None, experts) for attention in attentions),
        rope=ropes[0] if ropes else None,
        other_ropes=ropes[1:],
        sharded_dims=("intermediate_size",),
        hyperparameters=GraniteSwaHyperparameters(
            intermediate_size=mlp_size,
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=has_mlp and flag(config, "mlp_bias", False),
            norm_eps=number(config, "rms_norm_eps", norm_eps),
            embedding_multiplier=number(config, "embedding_multiplier", 1.0),
            attention_multiplier=number(config, "attention_multiplier", 1.0),
            residual_multiplier=number(config, "residual_multiplier", 1.0),
            logits_scaling=number(config, "logits_scaling", 1.0),
        ),
    )


def _thetas(config: JsonObject, theta: float, num_layers: int) -> list[float]:
    """Return the rotary base of each layer, 0 for one without positions: `theta` unless config.json lists them."""
    given = config.get("layer_rope_theta")
    if given is None:
        return [theta] * num_layers
    if not isinstance(given, list) or len(given) != num_layers or not all(_is_base(theta) for theta in given):
        raise ModelError(
            f"config.json has layer_rope_theta = {given!r}, which should be {num_layers} numbers from 0 on"
        )
    return [float(theta) for theta in given]


def _is_base(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
