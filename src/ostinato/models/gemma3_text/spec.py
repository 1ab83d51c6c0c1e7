"""Gemma 3, its text model (arXiv 2503.19786): layers with a window, and between them some that see all positions.

Layers with a window have a separate rotary embedding. Gemma 2 has the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    rope_pair,
    shared_fields,
    sliding_layers,
    soft_cap,
    with_defaults,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

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
    has_qk_norms: bool
    """True if each query and key has a norm of its own."""
    logits_cap: float | None
    """Logits x become cap * tanh(x / cap)."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma3_text` config.json.

    Scores are not capped, whatever `attn_logit_softcapping` is, as in transformers. ModelError for attention in both
    directions.
    """
    slides = sliding_layers(config, PATTERN)
    head_dim = integer(config, "head_dim", HEAD_DIM)
    ropes = rope_pair(config, head_dim, THETA, LOCAL_THETA, "rope_local_base_freq")
    config = {**with_defaults(config, max_position_embeddings=LONGEST), "attn_logit_softcapping": None}
    return _gemma_spec(config, "gemma3_text", slides, ropes, has_qk_norms=True)


def gemma2_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gemma2` config.json (arXiv 2408.00118): every other layer has a window, logits are capped.

    So are scores; a cap of null is no cap. ModelError for attention in both directions.
    """
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = {"max_position_embeddings": 8192, **caps, **config}
    rope = parse_rope(config, integer(config, "head_dim", HEAD_DIM))
    return _gemma_spec(config, "gemma2", sliding_layers(config, 2), (rope,), has_qk_norms=False)


def _gemma_spec(
    config: JsonObject, architecture: str, slides: Sequence[bool], ropes: Sequence[RopeSpec], *, has_qk_norms: bool
) -> ModelSpec:
    """Return the spec of a config.json of Gemma 2 or 3, whose layers have a window if they slide.

    `ropes` are the rotary embeddings: that of all layers, or that of layers without a window and that of the others.
    """
    activation(config, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    if flag(config, "use_bidirectional_attention", False):
        raise ModelError("config.json has use_bidirectional_attention = true; supported: false")
    heads = with_defaults(config, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    attention = attention_spec(heads, HEAD_DIM)
    attention = replace(attention, softcap=soft_cap(config, "attn_logit_softcapping"))
    windows = layer_windows(config, slides, WINDOW)
    return ModelSpec(
        architecture=architecture,
        **shared_fields(config, default_tied=True),
        layers=tuple(
            LayerSpec(LOCAL if slid else GLOBAL, replace(attention, rope=int(slid and len(ropes) > 1), window=window))
            for slid, window in zip(slides, windows, strict=True)
        ),
        rope=ropes[0],
        other_ropes=tuple(ropes[1:]),
        sharded_dims=("intermediate_size",),
        hyperparameters=Gemma3Hyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            attention_bias=flag(config, "attention_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            scale=number(config, "query_pre_attn_scalar", SCALAR) ** -0.5,
            has_qk_norms=has_qk_norms,
            logits_cap=soft_cap(config, "final_logit_softcapping"),
        ),
    )
