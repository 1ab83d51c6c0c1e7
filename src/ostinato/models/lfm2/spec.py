"""LFM2: a short convolution or attention, then a gated MLP, in every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    attention_spec,
    flag,
    flag_is,
    integer,
    layer_kinds,
    number,
    parse_rope,
    shared_fields,
    usual_experts,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import ShortConvSpec
from ostinato.plan.model import ModelSpec

KINDS = {"conv": "conv", "full_attention": "attention"}
"""Kinds of layers by the values of `layer_types`."""

DEFAULT_THETA = 1e6


@dataclass(frozen=True)
class Lfm2Hyperparameters:
    """Hyperparameters of models/lfm2/model.py, besides the layers."""

    intermediate_size: int
    conv_bias: bool
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `lfm2` config.json, in either spelling of its layer kinds and of its MLP's size."""
    return _lfm2_spec(config, "lfm2", _intermediate_size(config))


def _lfm2_spec(config: JsonMapping, architecture: str, intermediate_size: int) -> ModelSpec:
    """Return the spec of a model like LFM2."""
    flag_is(config, "block_use_swiglu", True)
    attention = attention_spec(config)
    conv = ShortConvSpec(integer(config, "hidden_size"), integer(config, "conv_L_cache", 3))
    for name in ("conv_dim", "conv_dim_out", "block_dim"):
        if integer(config, name, conv.channels) != conv.channels:
            raise ModelError(f"config.json has {name} = {config[name]!r}; it should be hidden_size = {conv.channels}")
    layers = {"attention": LayerSpec("attention", attention), "conv": LayerSpec("conv", mixer=conv)}
    shared = shared_fields(config, default_tied=True)
    shared["tied_embeddings"] = flag(config, "tie_embedding", shared["tied_embeddings"])
    return ModelSpec(
        architecture=architecture,
        **shared,
        layers=tuple(layers[kind] for kind in _kinds(config)),
        rope=parse_rope(config, attention.head_dim, default_theta=DEFAULT_THETA),
        sharded_dims=("intermediate_size",),
        hyperparameters=Lfm2Hyperparameters(
            intermediate_size=intermediate_size,
            conv_bias=flag(config, "conv_bias", False),
            norm_eps=number(config, "norm_eps", 1e-5),
        ),
    )


def _kinds(config: JsonMapping) -> tuple[str, ...]:
    """Return layer kinds from `layer_types`, or from `full_attn_idxs`.

    Without either, every layer has attention, as in transformers.
    """
    kinds = layer_kinds(config, KINDS)
    if kinds is not None:
        return kinds
    count, places = integer(config, "num_hidden_layers"), config.get("full_attn_idxs")
    places = list(range(count)) if places is None else places
    wrong = [place for place in places if type(place) is not int or not 0 <= place < count]
    if wrong:
        raise ModelError(f"config.json has full_attn_idxs {wrong}, which should be 0 to {count - 1}")
    return tuple("attention" if i in places else "conv" for i in range(count))


def _intermediate_size(config: JsonMapping) -> int:
    """Return the inner size of the MLP.

    It is as given, or if it is to be adjusted, two thirds of that, times a factor and rounded up.
    """
    name = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    size = integer(config, name)
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    unit = integer(config, "block_multiple_of", 256)
    return -(-int(number(config, "block_ffn_dim_multiplier", 1.0) * size) // unit) * unit


@dataclass(frozen=True)
class Lfm2MoeHyperparameters(Lfm2Hyperparameters):
    """Hyperparameters of models/lfm2/model.py, besides the layers."""

    has_expert_bias: bool
    normalize: bool
    scaling: float


def lfm2_moe_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `lfm2_moe` config.json: a gated MLP in the first layers, experts in the others."""
    if config.get("layer_types") is None:
        raise ModelError("config.json names no layer_types, which say where attention is")
    plain = _lfm2_spec(config, "lfm2_moe", integer(config, "intermediate_size"))
    num_dense = integer(config, "num_dense_layers", 2)
    experts = usual_experts(config, integer(config, "num_experts"), width="moe_intermediate_size")
    layers = (replace(layer, experts=experts) if i >= num_dense else layer for i, layer in enumerate(plain.layers))
    hyper = Lfm2MoeHyperparameters(
        **vars(plain.hyperparameters),
        has_expert_bias=flag(config, "use_expert_bias", True),
        normalize=flag(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor", 1.0),
    )
    return replace(plain, layers=tuple(layers), hyperparameters=hyper)
