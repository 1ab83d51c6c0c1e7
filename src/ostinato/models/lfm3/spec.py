"""LFM3: a short convolution, attention with a window or attention over all positions, then a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    FULL,
    SLIDING,
    attention_spec,
    flag,
    integer,
    layer_kinds,
    layer_windows,
    number,
    parse_rope,
    respelled,
    rope_parameters_of_kind,
    ropes_by_kind,
    shared_fields,
    with_defaults,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import ShortConvSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

HEAD_DIM, TAPS, WINDOW, LONGEST = 128, 7, 256, 128_000
"""Defaults of a config.json without these values."""

CONV, LOCAL, GLOBAL = "conv", "local", "global"
"""Kinds of layers: a short convolution, attention with a window, attention over the whole context."""

ROPES: dict[str, JsonObject] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Rotary embedding of each kind of attention in a config.json without `rope_parameters`."""


@dataclass(frozen=True)
class Lfm3Hyperparameters:
    """Hyperparameters of models/lfm3/model.py, besides the layers."""

    intermediate_size: int
    conv_bias: bool
    attention_bias: bool
    has_head_gates: bool
    has_post_norms: bool
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `lfm3` config.json."""
    config = respelled(config, {"rms_norm_eps": "norm_eps"})
    config = with_defaults(config, max_position_embeddings=LONGEST)
    attention = attention_spec(config, HEAD_DIM)
    kinds = _kinds(config)
    windows = layer_windows({**config, "layer_types": None}, [kind == LOCAL for kind in kinds], WINDOW)
    conv = LayerSpec(CONV, mixer=ShortConvSpec(integer(config, "hidden_size"), integer(config, "conv_L_cache", TAPS)))
    return ModelSpec(
        architecture="lfm3",
        **shared_fields(config, default_tied=True),
        layers=tuple(
            conv if kind == CONV else LayerSpec(kind, replace(attention, rope=int(kind == LOCAL), window=window))
            for kind, window in zip(kinds, windows, strict=True)
        ),
        rope=rope_of_kind(config, FULL, attention.head_dim, ROPES),
        other_ropes=(rope_of_kind(config, SLIDING, attention.head_dim, ROPES),),
        sharded_dims=("intermediate_size",),
        hyperparameters=Lfm3Hyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            conv_bias=flag(config, "conv_bias", False),
            attention_bias=flag(config, "attention_bias", False),
            has_head_gates=flag(config, "use_attention_gate", True),
            has_post_norms=flag(config, "use_sandwich_norm", True),
            norm_eps=number(config, "norm_eps", 1e-5),
        ),
    )


def _kinds(config: JsonMapping) -> tuple[str, ...]:
    """Return the kind of each layer: by `layer_types`, or convolutions with attention at every second layer."""
    count = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, {"conv": CONV, SLIDING: LOCAL, FULL: GLOBAL})
    if kinds is not None:
        return kinds
    return tuple(CONV if i == 0 or i % 2 else LOCAL if i % 4 == 0 else GLOBAL for i in range(count))


def rope_of_kind(config: JsonMapping, kind: str, head_dim: int, defaults: Mapping[str, JsonObject]) -> RopeSpec:
    """Return the rotary embedding of the attention layers of a kind; ModelError if it is not for whole heads.

    `defaults` are those of a config.json without `rope_parameters`.
    """
    of_kind = ropes_by_kind(config, defaults).get(kind) or defaults[kind]
    longest = {name: config.get(name) for name in ("max_position_embeddings", "original_max_position_embeddings")}
    of_kind = {**longest, "rope_parameters": rope_parameters_of_kind(of_kind)}
    rope = parse_rope(of_kind, head_dim, 1.0, defaults[FULL]["rope_theta"])
    if rope.rotary_dim != head_dim:
        raise ModelError(
            f"config.json rotates {rope.rotary_dim} of {head_dim} elements of the heads of {kind} by rope type "
            f"{rope.kind!r}; supported: partial_rotary_factor = 1, or rope type 'proportional'"
        )
    return rope
