"""Gemma 3, its text model (arXiv 2503.19786): layers with a window, and between them some that see all positions.

Layers with a window have a separate rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.config_json import (
    FULL,
    SLIDING,
    activation,
    attention_spec,
    flag,
    integer,
    layer_windows,
    number,
    parse_rope,
    shared_fields,
    window_kinds,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

SHARDED_DIMS = ("intermediate_size",)
"""Hyperparameters that ranks share, as widths of MLPs and experts."""

THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
HEADS, KEY_HEADS, HEAD_DIM, SCALAR, WINDOW, PATTERN, LONGEST = 8, 4, 256, 256, 4096, 6, 131072
"""Defaults of a config.json without these values."""

LOCAL, GLOBAL = "local", "global"
"""Kinds of layers: with a window and the local rotary embedding, or over the whole context."""


@dataclass(frozen=True)
class Gemma3Hyperparameters:
    """Hyperparameters of models/gemma3_text/model.py, besides the layers."""

    intermediate_size: int
    attention_bias: bool
    norm_eps: float
    scale: float


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a `gemma3_text` config.json.

    ModelError for soft-capping and for attention in both directions.
    """
    activation(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(name) is not None:
            raise ModelError(f"config.json has {name} = {config[name]!r}; supported: null, no soft-capping")
    if flag(config, "use_bidirectional_attention", False):
        raise ModelError("config.json has use_bidirectional_attention = true; supported: false")
    config = {**config, "max_position_embeddings": integer(config, "max_position_embeddings", LONGEST)}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    attention = attention_spec({**config, **{name: integer(config, name, heads[name]) for name in heads}}, HEAD_DIM)
    slides = _sliding_layers(config)
    windows = layer_windows(config, slides, WINDOW)
    of_all, local = _ropes(config, attention.head_dim)
    return ModelSpec(
        architecture="gemma3_text",
        **shared_fields(config, default_tied=True),
        layers=tuple(
            LayerSpec(LOCAL if slides else GLOBAL, replace(attention, is_local=slides, window=window))
            for slides, window in zip(slides, windows, strict=True)
        ),
        rope=of_all,
        local_rope=local,
        sharded_dims=SHARDED_DIMS,
        hyperparameters=Gemma3Hyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            attention_bias=flag(config, "attention_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            scale=number(config, "query_pre_attn_scalar", SCALAR) ** -0.5,
        ),
    )


def _sliding_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it is local: by `layer_types`, or all but every `sliding_window_pattern`-th."""
    num_layers = integer(config, "num_hidden_layers")
    kinds = window_kinds(config)
    if kinds is not None:
        return [kind == SLIDING for kind in kinds]
    pattern = integer(config, "sliding_window_pattern", PATTERN)
    if pattern < 1:
        raise ModelError(f"config.json has sliding_window_pattern = {pattern}, which should be 1 or more")
    return [(number + 1) % pattern != 0 for number in range(num_layers)]


def _ropes(config: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of layers over the whole context and of those with a window.

    `rope_parameters` has a dict for each; in the older spelling `rope_theta` and `rope_scaling` are the first's, and
    `rope_local_base_freq` is the other's theta.
    """
    given = config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not set(given) <= {FULL, SLIDING}:
        raise ModelError(
            f"config.json has rope_parameters = {given!r}; supported: a dict for each of {FULL}, {SLIDING}"
        )
    plain = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    of_all = {**(given.get(FULL) or {}), **(config.get("rope_scaling") or {})}
    local_plain = {**plain, "rope_theta": config.get("rope_local_base_freq")}
    local = parse_rope({**local_plain, "rope_parameters": given.get(SLIDING)}, head_dim, default_theta=LOCAL_THETA)
    if local.kind == "dynamic":
        raise ModelError(f"rope type 'dynamic' of {SLIDING} is not supported; supported: default")
    return parse_rope({**plain, "rope_parameters": of_all}, head_dim, default_theta=THETA), local
