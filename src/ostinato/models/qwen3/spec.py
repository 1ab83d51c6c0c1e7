"""Qwen3: attention with normed queries and keys, and a gated MLP, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.checkpoint import checkpoint_dtype
from ostinato.models.hyperparameters import (
    activation,
    attention_linears,
    attention_parameters,
    flag,
    integer,
    mlp_linears,
    mlp_parameters,
    number,
)
from ostinato.plan.model import AttentionSpec, LayerSpec, ModelSpec
from ostinato.plan.rope import parse_rope

TEXT_OPS = ("attention", "embedding", "linear", "rms_norm", "rotary")
"""Beside the operation that gives the angles."""


@dataclass(frozen=True)
class Qwen3Hyperparameters:
    """What models/qwen3/model.py builds from."""

    attention: AttentionSpec
    intermediate_size: int
    attention_bias: bool
    norm_eps: float


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `qwen3` config.json. ModelError if a layer's attention is not over the whole context."""
    activation(config, "hidden_act", "silu", ("silu",))
    _refuse_other_attention(config)
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    hyper = hyperparameters(config, 128)
    tied = flag(config, "tie_word_embeddings", False)
    return ModelSpec(
        architecture="qwen3",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        tied_embeddings=tied,
        layers=(dense_layer(hyper, hidden_size),) * integer(config, "num_hidden_layers"),
        outer_parameters=vocab_size * hidden_size * (1 if tied else 2) + hidden_size,
        ssm_state_dtype=None,
        rope=parse_rope(config, hyper.attention.head_dim),
        ops=(*TEXT_OPS, "rotary_angles"),
        hyperparameters=hyper,
    )


def hyperparameters(config: Mapping[str, Any], head_dim: int) -> Qwen3Hyperparameters:
    """Of the layers; `head_dim` is that of a config.json that names none."""
    num_heads = integer(config, "num_attention_heads")
    return Qwen3Hyperparameters(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer(config, "head_dim", head_dim),
        ),
        intermediate_size=integer(config, "intermediate_size"),
        attention_bias=flag(config, "attention_bias", False),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
    )


def _refuse_other_attention(config: dict[str, Any]) -> None:
    """Layers with a window are named in `layer_types`, or else are those from `max_window_layers` on."""
    others = sorted({str(kind) for kind in config.get("layer_types") or () if kind != "full_attention"})
    if others:
        raise ModelError(f"config.json has layer_types {', '.join(others)}; supported: full_attention")
    windowed = flag(config, "use_sliding_window", False) and config.get("sliding_window", 4096) is not None
    if config.get("layer_types") or not windowed:
        return
    first, num_layers = integer(config, "max_window_layers", 28), integer(config, "num_hidden_layers")
    if first < num_layers:
        raise ModelError(
            f"config.json has use_sliding_window and max_window_layers = {first}, so layers {first} to "
            f"{num_layers - 1} would see a part of the context; supported: attention over all of it"
        )


def dense_layer(hyper: Qwen3Hyperparameters, hidden_size: int) -> LayerSpec:
    """A layer whose feed-forward part is one gated MLP."""
    layer = attention_part(hyper, hidden_size)
    return replace(
        layer,
        parameters=layer.parameters + mlp_parameters(hidden_size, hyper.intermediate_size),
        activation_elements=max(layer.activation_elements, 3 * hyper.intermediate_size),
        linears=layer.linears + mlp_linears(hidden_size, hyper.intermediate_size, "mlp"),
    )


def attention_part(hyper: Qwen3Hyperparameters, hidden_size: int) -> LayerSpec:
    """A layer's attention and its two norms, without what comes between."""
    attention = hyper.attention
    parameters = attention_parameters(hidden_size, attention, hyper.attention_bias, qk_norm=True)
    width = 2 * attention.num_heads * attention.head_dim + attention.kv_elements_per_token
    linears = attention_linears(hidden_size, attention, "self_attn")
    return LayerSpec("attention", attention, None, parameters + 2 * hidden_size, 0, width, linears=linears)
