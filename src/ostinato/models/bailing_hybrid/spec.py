"""Ling 3.0: KDA with a bounded decay or latent attention with a gate per head, then an MLP or experts.

The layers are those of Kimi Linear but for that, and the latent attention has positions. A prediction head follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import activation, flag, flag_is, integer, layer_kinds, number, shared_fields
from ostinato.models.kimi_linear.spec import (
    KINDS,
    KimiLinearHyperparameters,
    check_no_query_rank,
    has_experts,
    kimi_fields,
    latent_attention,
    latent_rope,
    router,
    spelled,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.model import DrafterSpec, ModelSpec

THETA, SCALING, NUM_DENSE, GROUP_SIZE, DECAY_BOUND = 6e6, 2.5, 2, 6, -5.0
GROUPS = {"num_expert_group": 8, "topk_group": 4}
"""Defaults of a config.json without these values."""


@dataclass(frozen=True)
class BailingHybridHyperparameters(KimiLinearHyperparameters):
    """Hyperparameters of models/bailing_hybrid/model.py, besides the layers."""

    decay_bound: float
    """Number below 0 that no log decay goes below; 0 without one."""
    num_layers: int
    """Number of the model's layers; in a checkpoint it is the prediction head's number."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `bailing_hybrid` config.json, as published or as transformers writes it.

    ModelError for the linear attention of earlier models of this type, which has no convolution.
    """
    config = {**GROUPS, **spelled(config)}
    activation(config, "hidden_act", "silu", ("silu",))
    flag_is(config, "attention_bias", False)
    check_no_query_rank(config)
    latent, attention = latent_attention(config, rotates=True)
    moe, shared = router(config, SCALING), shared_fields(config)
    # transformers does not tie it, whatever config.json says.
    shared["tied_embeddings"] = False
    layers = {"attention": LayerSpec("attention", attention), "delta_net": LayerSpec("delta_net", mixer=_mixer(config))}
    kinds, count = _kinds(config), integer(config, "num_hidden_layers")
    each = zip(kinds, has_experts(config, NUM_DENSE), strict=True)
    head = replace(layers["attention"], experts=moe.experts)
    return ModelSpec(
        architecture="bailing_hybrid",
        **shared,
        layers=tuple(replace(layers[kind], experts=moe.experts if is_sparse else None) for kind, is_sparse in each),
        rope=latent_rope(_whole_rotation(config), latent, THETA),
        sharded_dims=("intermediate_size", "shared_size"),
        hyperparameters=BailingHybridHyperparameters(
            **kimi_fields(config, latent, moe, norm_eps=1e-6),
            decay_bound=_decay_bound(config),
            num_layers=count,
        ),
        head=DrafterSpec("mtp", (head,), hidden_elements=shared["hidden_size"]) if _has_head(config) else None,
    )


def _mixer(config: JsonMapping) -> GatedDeltaSpec:
    """Return the delta net: as many heads as attention has, of `head_dim`, which transformers writes elsewhere."""
    heads = integer(config, "linear_num_heads", integer(config, "num_attention_heads"))
    size = integer(config, "linear_head_dim", integer(config, "head_dim", 128))
    width = integer(config, "linear_conv_kernel_dim", integer(config, "short_conv_kernel_size"))
    return GatedDeltaSpec(heads, heads, size, size, width, per_channel=True)


def _kinds(config: JsonMapping) -> tuple[str, ...]:
    """Return layer kinds from `layer_types`, or attention for the last layer of each `layer_group_size`."""
    kinds = layer_kinds(config, KINDS)
    if kinds is not None:
        return kinds
    size = integer(config, "layer_group_size", GROUP_SIZE, least=1)
    return tuple("delta_net" if (i + 1) % size else "attention" for i in range(integer(config, "num_hidden_layers")))


def _decay_bound(config: JsonMapping) -> float:
    bound = number(config, "kda_lower_bound", DECAY_BOUND)
    if not flag(config, "kda_safe_gate", True):
        return 0.0
    if not bound < 0:
        raise ModelError(f"config.json has kda_lower_bound = {bound}; it should be below 0, or kda_safe_gate false")
    return bound


def _has_head(config: JsonMapping) -> bool:
    """Return whether there is a prediction head: one layer with attention and experts."""
    count = integer(config, "num_nextn_predict_layers", 0)
    if count > 1:
        raise ModelError(f"config.json has num_nextn_predict_layers = {count}; supported: 0 and 1")
    for name, kind in (("mtp_layer_types", "full_attention"), ("mtp_mlp_layer_types", "sparse")):
        if count and config.get(name) not in (None, [kind]):
            raise ModelError(f"config.json has {name} = {config[name]!r}; supported: [{kind!r}]")
    return count == 1


def _whole_rotation(config: JsonMapping) -> JsonObject:
    """Return the config without the rotated part of a head: all of what heads share is rotated, as in transformers.

    Rotary embeddings that scale keep it, and are refused with it, but for `proportional`.
    """
    without = {name: value for name, value in config.items() if name != "partial_rotary_factor"}
    for name in ("rope_parameters", "rope_scaling"):
        given = without.get(name)
        if isinstance(given, Mapping) and (given.get("rope_type") or given.get("type") or "default") == "default":
            without[name] = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    return without
