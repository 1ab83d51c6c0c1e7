"""Kimi Linear: a delta net with a decay per key channel (KDA) or latent attention (MLA), then an MLP or experts.

The multi-head latent attention has no positions. The first layers have a gated MLP, the others experts with shared
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    DEFAULT_THETA,
    activation,
    flag,
    flag_is,
    grouped_top_k,
    integer,
    layer_kinds,
    number,
    parse_rope,
    shared_fields,
)
from ostinato.plan.layer_specs import AttentionSpec, ExpertsSpec, LatentSizes, LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec

KINDS = {"linear_attention": "delta_net", "full_attention": "attention"}
MLP_KINDS = {"dense": "dense", "sparse": "sparse"}

SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_nextn_predict_layers": "num_mtp_layers",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of transformers' attributes by the names in the published config.json, which transformers writes too."""

DELTA_NETS = "linear_attn_config"
"""Key of the published config.json for the sizes of delta nets and the numbers of the layers."""


@dataclass(frozen=True)
class RouterHyperparameters:
    """Parameters of the choice of experts, by the sigmoids of their scores."""

    experts: ExpertsSpec
    num_groups: int
    top_groups: int
    normalize: bool
    scaling: float


@dataclass(frozen=True)
class KimiLinearHyperparameters:
    """Hyperparameters of models/kimi_linear/model.py, besides the layers.

    `shared_size` is the number of inner activations of all shared experts together.
    """

    latent: LatentSizes
    moe: RouterHyperparameters
    intermediate_size: int
    shared_size: int
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `kimi_linear` config.json, as published or as transformers writes it."""
    config = spelled(config)
    _check(config)
    kinds = zip(_kinds(config), has_experts(config), strict=True)
    latent, attention = latent_attention(config, rotates=False)
    dense = {
        "attention": LayerSpec("attention", attention),
        "delta_net": LayerSpec("delta_net", mixer=kda(config)),
    }
    moe = router(config)
    # transformers does not tie it, whatever config.json says.
    shared = {**shared_fields(config), "tied_embeddings": False}
    layers = (replace(dense[kind], experts=moe.experts if is_sparse else None) for kind, is_sparse in kinds)
    return ModelSpec(
        architecture="kimi_linear",
        **shared,
        layers=tuple(layers),
        rope=None,
        sharded_dims=("intermediate_size", "shared_size"),
        hyperparameters=KimiLinearHyperparameters(**kimi_fields(config, latent, moe, norm_eps=1e-5)),
    )


def kimi_fields(
    config: JsonMapping, latent: LatentSizes, moe: RouterHyperparameters, norm_eps: float
) -> dict[str, Any]:
    """Return the fields of KimiLinearHyperparameters; `norm_eps` is the default for a config.json without one."""
    return {
        "latent": latent,
        "moe": moe,
        "intermediate_size": integer(config, "intermediate_size"),
        "shared_size": moe.experts.intermediate_size * integer(config, "num_shared_experts", 1),
        "norm_eps": number(config, "rms_norm_eps", norm_eps),
    }


def spelled(config: JsonMapping) -> JsonObject:
    """Return the config with all of `SPELLINGS` as published, and the length under the usual key.

    A null is no value, but for weights that add up to 1: in transformers it is false.
    """
    if "moe_renormalize" in config:
        config = {**config, "moe_renormalize": bool(config["moe_renormalize"])}
    found = {name: config[other] for name, other in SPELLINGS.items() if config.get(other) is not None}
    spelled = {**found, **{name: value for name, value in config.items() if value is not None}}
    return {**spelled, "max_position_embeddings": spelled.get("model_max_length")}


def _check(config: JsonMapping) -> None:
    """Raise ModelError for features that are not implemented."""
    activation(config, "hidden_act", "silu", ("silu",))
    activation(config, "moe_router_activation_func", "sigmoid", ("sigmoid",))
    flag_is(config, "mla_use_nope", True)
    flag_is(config, "attention_bias", False)
    flag_is(config, "use_grouped_topk", True)
    for name, only in (("moe_layer_freq", 1), ("num_nextn_predict_layers", 0)):
        if integer(config, name, only) != only:
            raise ModelError(f"config.json has {name} = {config[name]}; supported: {only}")
    check_no_query_rank(config)


def check_no_query_rank(config: JsonMapping) -> None:
    """Raise ModelError for queries that are projected from a latent."""
    if config.get("q_lora_rank") is not None:
        raise ModelError(f"config.json has q_lora_rank = {config['q_lora_rank']!r}; supported: null")


def latent_attention(config: JsonMapping, *, rotates: bool) -> tuple[LatentSizes, AttentionSpec]:
    """Return the sizes of latent attention, and its heads in the cache. ModelError for fewer key heads than heads.

    A key that does not rotate may have no part that heads share.
    """
    heads = integer(config, "num_attention_heads", least=1)
    if integer(config, "num_key_value_heads", heads) != heads:
        raise ModelError(
            f"config.json has num_key_value_heads = {config['num_key_value_heads']}; supported: as many as "
            f"num_attention_heads, {heads}, since all heads share one latent"
        )
    latent = LatentSizes(
        rank=integer(config, "kv_lora_rank", least=1),
        shared=integer(config, "qk_rope_head_dim", least=int(rotates)),
        key=integer(config, "qk_nope_head_dim", least=1),
        value=integer(config, "v_head_dim", least=1),
    )
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.rank + latent.shared,
        rotates=rotates,
        values_in_keys=True,
    )
    return latent, attention


def latent_rope(config: JsonMapping, latent: LatentSizes, default_theta: float = DEFAULT_THETA) -> RopeSpec:
    """Return the rotary embedding of the keys that heads share."""
    return parse_rope(config, latent.shared, default_theta=default_theta)


def score_scale(rope: RopeSpec | None) -> float:
    """Return the factor of scores that YaRN's `mscale_all_dim` asks for, as in DeepSeek-V2."""
    of_all = 0.0 if rope is None else rope.parameters.get("mscale_all_dim") or 0.0
    if rope is None or not of_all or rope.parameters["factor"] <= 1:
        return 1.0
    return float((0.1 * of_all * math.log(rope.parameters["factor"]) + 1.0) ** 2)


def kda(config: JsonMapping) -> GatedDeltaSpec:
    """Return the delta net; queries, keys and values have the same number and size of heads."""
    published = published_part(config)
    sizes = {
        "linear_head_dim": published.get("head_dim"),
        "linear_num_heads": published.get("num_heads"),
        "linear_conv_kernel_dim": published.get("short_conv_kernel_size"),
    }
    own = {**config, **{name: value for name, value in sizes.items() if value is not None}}
    heads, size = integer(own, "linear_num_heads"), integer(own, "linear_head_dim")
    return GatedDeltaSpec(
        num_heads=heads,
        num_key_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_kernel=integer(own, "linear_conv_kernel_dim", 4),
        per_channel=True,
    )


def published_part(config: JsonMapping) -> JsonMapping:
    """Return the dict in which a published config.json has what concerns delta nets; {} without one."""
    published = config.get(DELTA_NETS) or {}
    if not isinstance(published, Mapping):
        raise ModelError(f"config.json has {DELTA_NETS} = {published!r}, which should be an object")
    return published


def _kinds(config: JsonMapping) -> tuple[str, ...]:
    """Return layer kinds from `layer_types`, or from the numbers of the layers of each kind, which count from 1."""
    kinds = layer_kinds(config, KINDS)
    if kinds is not None:
        return kinds
    published, count = published_part(config), integer(config, "num_hidden_layers")
    names = {"kda_layers": "delta_net", "full_attn_layers": "attention"}
    lists = {name: published.get(name) for name in names}
    if any(not isinstance(numbers, list) for numbers in lists.values()):
        raise ModelError(f"config.json has neither layer_types nor kda_layers and full_attn_layers in {DELTA_NETS}")
    numbered = [(number, kind) for name, kind in names.items() for number in lists[name] or ()]
    if [number for number, _ in sorted(numbered, key=str)] != sorted(range(1, count + 1), key=str):
        raise ModelError(
            f"config.json has kda_layers and full_attn_layers which should be the numbers from 1 to {count}, each once"
        )
    return tuple(kind for _, kind in sorted(numbered))


def has_experts(config: JsonMapping, num_dense: int = 1) -> list[bool]:
    """Return for each layer whether it has experts.

    They come from `mlp_layer_types`, or are all but the first `first_k_dense_replace` layers, by default `num_dense`.
    """
    kinds = layer_kinds(config, MLP_KINDS, ("mlp_layer_types",))
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    dense = integer(config, "first_k_dense_replace", num_dense)
    return [i >= dense for i in range(integer(config, "num_hidden_layers"))]


def router(config: JsonMapping, scaling: float = 2.446) -> RouterHyperparameters:
    """Return the parameters of the choice of experts; `scaling` is the default of the factor of their weights."""
    num_experts = integer(config, "num_experts")
    chosen, groups, top_groups = grouped_top_k(
        config, num_experts, ("num_experts_per_token", "num_expert_group", "topk_group")
    )
    return RouterHyperparameters(
        experts=ExpertsSpec(
            num_experts=num_experts,
            top_k=chosen,
            size=integer(config, "hidden_size"),
            intermediate_size=integer(config, "moe_intermediate_size"),
        ),
        num_groups=groups,
        top_groups=top_groups,
        normalize=flag(config, "moe_renormalize", True),
        scaling=number(config, "routed_scaling_factor", scaling),
    )
