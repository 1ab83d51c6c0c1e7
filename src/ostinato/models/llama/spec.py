"""Llama: attention and a gated MLP in every layer. `qwen2`, `mistral` and `smollm3` are the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    DEFAULT_THETA,
    activation,
    attention_spec,
    flag,
    integer,
    number,
    parse_rope,
    shared_fields,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

SHARDED_DIMS = ("intermediate_size",)
"""Hyperparameters that ranks share, as widths of MLPs and experts."""


@dataclass(frozen=True)
class LlamaHyperparameters:
    """Hyperparameters of models/llama/model.py, besides the layers."""

    intermediate_size: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `llama` config.json."""
    bias = flag(config, "attention_bias", False)
    mlp_bias = flag(config, "mlp_bias", False)
    return llama_spec(config, "llama", qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def llama_spec(
    config: JsonMapping,
    architecture: str,
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool,
    head_dim: int | None = None,
    default_tied: bool = False,
    default_theta: float = DEFAULT_THETA,
    rotates: Sequence[bool] | None = None,
    windows: Sequence[int | None] | None = None,
) -> ModelSpec:
    """Return the spec of a model like Llama.

    `head_dim`, `default_tied` and `default_theta` are defaults for a config.json without these values. `rotates` tells
    for each layer whether it has positions; by default all have. `windows` are the layers' windows; by default there
    are none.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    attention, num_layers = attention_spec(config, head_dim), integer(config, "num_hidden_layers")
    return ModelSpec(
        architecture=architecture,
        **shared_fields(config, default_tied),
        layers=tuple(
            LayerSpec("attention", replace(attention, rotates=each, window=window))
            for each, window in zip(rotates or (True,) * num_layers, windows or (None,) * num_layers, strict=True)
        ),
        rope=parse_rope(config, attention.head_dim, default_theta=default_theta),
        sharded_dims=SHARDED_DIMS,
        hyperparameters=LlamaHyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            mlp_bias=mlp_bias,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        ),
    )
