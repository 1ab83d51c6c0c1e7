"""Llama: attention and a gated MLP in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.models.hyperparameters import activation, attention_spec, flag, integer, number, shared_fields
from ostinato.models.rope import parse_rope
from ostinato.plan.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class LlamaHyperparameters:
    """What models/llama/model.py builds from, beside the layers."""

    intermediate_size: int
    attention_bias: bool
    mlp_bias: bool
    norm_eps: float


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `llama` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    attention, intermediate_size = attention_spec(config), integer(config, "intermediate_size")
    return ModelSpec(
        architecture="llama",
        **shared_fields(config),
        layers=(LayerSpec("attention", attention),) * integer(config, "num_hidden_layers"),
        rope=parse_rope(config, attention.head_dim),
        hyperparameters=LlamaHyperparameters(
            intermediate_size=intermediate_size,
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        ),
    )
