"""Llama: attention, and a gated MLP or experts, in every layer. Most dense decoders are the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    DEFAULT_THETA,
    activation,
    attention_spec,
    flag,
    integer,
    layer_windows,
    number,
    parse_rope,
    rope_pair,
    shared_fields,
)
from ostinato.plan.layer_specs import ExpertsSpec, LayerSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec


@dataclass(frozen=True)
class LlamaHyperparameters:
    """Hyperparameters of models/llama/model.py, besides the layers."""

    intermediate_size: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    norm_eps: float
    has_neighbours: bool = False
    """True if the rows of queries and keys that positions rotate together are neighbours in the checkpoint."""
    has_packed_tensors: bool = False
    """True if the checkpoint has queries, keys and values as one tensor, and gates with what they gate."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Scale of attention scores, in place of head_dim ** -0.5."""
    query_growth: tuple[float, int] | None = None
    """(beta, length): queries at position p are multiplied by 1 + beta ln(1 + floor(p / length))."""
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    qk_norms: Literal["of_heads", "of_all"] | None = None
    """Norms of queries and keys: for each head, or for all heads together."""
    norms_results: bool = False
    """True if norms follow attention and MLP, in place of preceding them."""
    is_parallel: bool = False
    """True if attention and MLP have one input, a layer norm of the residual stream; the last norm is one too."""
    normalizes: bool = True
    """True if the weights of the chosen experts add up to 1."""
    experts_in: str = "mlp"
    """Checkpoint's name of a layer's experts and their router."""
    unread: str = ""
    """Prefix of the checkpoint's tensors that are not read, those of a prediction head."""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Checkpoint's names of an expert's matrices."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `llama` config.json."""
    bias = flag(config, "attention_bias", False)
    mlp_bias = flag(config, "mlp_bias", False)
    return llama_spec(config, "llama", qkv_bias=bias, mlp_bias=mlp_bias)


def llama_spec(
    config: JsonMapping,
    architecture: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool | None = None,
    mlp_bias: bool = False,
    head_dim: int | None = None,
    default_tied: bool = False,
    default_theta: float = DEFAULT_THETA,
    local_theta: float | None = None,
    default_partial: float | None = None,
    slides: Sequence[bool] | None = None,
    default_window: int | None = None,
    rotates: Sequence[bool] | None = None,
    windows: Sequence[int | None] | None = None,
    experts: Sequence[ExpertsSpec | None] | None = None,
    default_eps: float = 1e-6,
    **hyperparameters: Any,
) -> ModelSpec:
    """Return the spec of a model like Llama.

    `head_dim` and those that begin with `default` are defaults for a config.json without these values. `out_bias` is as
    `qkv_bias` by default. `rotates` tells for each layer whether it has positions; by default all have. `slides` tells
    which have a window (see `layer_windows`); models with another rule give the `windows` themselves. By default there
    are none, and no `experts`. With `local_theta`, config.json has a rotary embedding of its own for the layers that
    `slides` names, of this theta by default. `default_partial` is that of `parse_rope`. `hyperparameters` are further
    ones of `LlamaHyperparameters`.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    attention, num_layers = attention_spec(config, head_dim), integer(config, "num_hidden_layers")
    nothing = (None,) * num_layers
    experts = experts or nothing
    if local_theta is None:
        ropes: tuple[RopeSpec, ...] = (parse_rope(config, attention.head_dim, default_partial, default_theta),)
    else:
        ropes = rope_pair(config, attention.head_dim, default_theta, local_theta, default_partial=default_partial)
    if slides is not None:
        windows = layer_windows(config, slides, default_window)
    is_local = slides if slides and local_theta is not None else (False,) * num_layers
    places = zip(rotates or (True,) * num_layers, is_local, windows or nothing, experts, strict=True)
    return ModelSpec(
        architecture=architecture,
        **shared_fields(config, default_tied),
        layers=tuple(
            LayerSpec("attention", replace(attention, rotates=turns, rope=int(local), window=window), experts=of_layer)
            for turns, local, window, of_layer in places
        ),
        rope=ropes[0],
        other_ropes=ropes[1:],
        sharded_dims=("intermediate_size",),
        hyperparameters=LlamaHyperparameters(
            # Where all layers have experts, no width of an MLP is shared among ranks.
            intermediate_size=integer(config, "intermediate_size") if None in experts else 0,
            qkv_bias=qkv_bias,
            out_bias=qkv_bias if out_bias is None else out_bias,
            mlp_bias=mlp_bias,
            norm_eps=number(config, "rms_norm_eps", default_eps),
            **hyperparameters,
        ),
    )
