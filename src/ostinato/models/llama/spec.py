"""Llama: attention and a gated MLP in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class LlamaHyperparameters:
    """What models/llama/model.py builds from."""

    attention: AttentionSpec
    intermediate_size: int
    attention_bias: bool
    mlp_bias: bool
    norm_eps: float


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `llama` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    num_heads = integer(config, "num_attention_heads")
    hyper = LlamaHyperparameters(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_heads),
            head_dim=integer(config, "head_dim", hidden_size // num_heads),
        ),
        intermediate_size=integer(config, "intermediate_size"),
        attention_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
    )
    tied = flag(config, "tie_word_embeddings", False)
    return ModelSpec(
        architecture="llama",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        tied_embeddings=tied,
        layers=(_layer(hyper, hidden_size),) * integer(config, "num_hidden_layers"),
        outer_parameters=vocab_size * hidden_size * (1 if tied else 2) + hidden_size,
        ssm_state_dtype=None,
        rope=parse_rope(config, hyper.attention.head_dim),
        ops=("attention", "embedding", "linear", "rms_norm", "rotary", "rotary_angles"),
        hyperparameters=hyper,
    )


def _layer(hyper: LlamaHyperparameters, hidden_size: int) -> LayerSpec:
    attention = hyper.attention
    parameters = attention_parameters(hidden_size, attention, hyper.attention_bias)
    parameters += mlp_parameters(hidden_size, hyper.intermediate_size, bias=hyper.mlp_bias)
    attention_width = 2 * attention.num_heads * attention.head_dim + attention.kv_elements_per_token
    width = max(attention_width, 3 * hyper.intermediate_size)
    linears = attention_linears(hidden_size, attention, "self_attn")
    linears += mlp_linears(hidden_size, hyper.intermediate_size, "mlp")
    return LayerSpec("attention", attention, None, parameters + 2 * hidden_size, 0, width, linears=linears)
