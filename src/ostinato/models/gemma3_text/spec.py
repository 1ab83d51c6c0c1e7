"""Gemma 3, its text model (arXiv 2503.19786): layers with a window, and between them some that see all positions.

Layers with a window have a separate rotary embedding.
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
    rope_pair,
    shared_fields,
    sliding_layers,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

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


def model_spec(config: JsonObject) -> ModelSpec:
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
    slides = sliding_layers(config, PATTERN)
    windows = layer_windows(config, slides, WINDOW)
    of_all, local = rope_pair(config, attention.head_dim, THETA, LOCAL_THETA, "rope_local_base_freq")
    return ModelSpec(
        architecture="gemma3_text",
        **shared_fields(config, default_tied=True),
        layers=tuple(
            LayerSpec(LOCAL if slides else GLOBAL, replace(attention, rope=int(slides), window=window))
            for slides, window in zip(slides, windows, strict=True)
        ),
        rope=of_all,
        other_ropes=(local,),
        sharded_dims=SHARDED_DIMS,
        hyperparameters=Gemma3Hyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            attention_bias=flag(config, "attention_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            scale=number(config, "query_pre_attn_scalar", SCALAR) ** -0.5,
        ),
    )
