"""Arcee: Llama whose MLP has no gate, and a squared ReLU between its two matrices."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.json_io import JsonObject
from ostinato.models.config_json import activation, attention_spec, flag, integer, number, parse_rope, shared_fields
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class ArceeHyperparameters:
    """Hyperparameters of models/arcee/model.py, besides the layers."""

    intermediate_size: int
    attention_bias: bool
    mlp_bias: bool
    mlp_activation: str
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `arcee` config.json."""
    attention = attention_spec(config)
    return ModelSpec(
        architecture="arcee",
        **shared_fields(config),
        layers=(LayerSpec("attention", attention),) * integer(config, "num_hidden_layers"),
        rope=parse_rope(config, attention.head_dim),
        sharded_dims=("intermediate_size",),
        hyperparameters=ArceeHyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
            mlp_activation=activation(config, "hidden_act", "relu2", ("relu2",)),
            norm_eps=number(config, "rms_norm_eps", 1e-5),
        ),
    )
