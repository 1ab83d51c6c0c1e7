"""Qwen3.5, its text model: a gated delta net or gated attention, then a gated MLP, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    flag_is,
    integer,
    layer_kinds,
    number,
    parse_rope,
    shared_fields,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec, StoredDeltaNet
from ostinato.plan.model import DrafterSpec, ModelSpec

KINDS = {"linear_attention": "delta_net", "full_attention": "attention"}
"""Kinds of layers by the values of `layer_types`."""
ROTATED = 0.25
"""Rotated part of a head, if config.json does not give it."""
HEAD_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys with the number of layers of a prediction head."""


@dataclass(frozen=True)
class Qwen35Hyperparameters:
    """Hyperparameters of models/qwen3_5_text/model.py, besides the layers."""

    intermediate_size: int
    attention_bias: bool
    norm_eps: float
    stored: StoredDeltaNet
    """Layout of delta nets in the checkpoint."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `qwen3_5_text` config.json."""
    return qwen35_spec(config, "qwen3_5_text", integer(config, "intermediate_size"))


def qwen35_spec(
    config: JsonMapping, architecture: str, intermediate_size: int, stored: StoredDeltaNet = "apart"
) -> ModelSpec:
    """Return the spec of a model like Qwen3.5, without its experts."""
    activation(config, "hidden_act", "silu", ("silu",))
    flag_is(config, "attn_output_gate", True)
    attention = attention_spec(config, 256)
    layers = {
        "attention": LayerSpec("attention", attention),
        "delta_net": LayerSpec("delta_net", mixer=delta_net(config)),
    }
    shared = shared_fields(config)
    shared["ssm_state_dtype"] = config.get("mamba_ssm_dtype") or shared["ssm_state_dtype"]
    return ModelSpec(
        architecture=architecture,
        **shared,
        layers=tuple(layers[kind] for kind in mixed_layers(config)),
        rope=parse_rope(config, attention.head_dim, default_partial=ROTATED),
        sharded_dims=("intermediate_size",),
        hyperparameters=Qwen35Hyperparameters(
            intermediate_size=intermediate_size,
            attention_bias=flag(config, "attention_bias", False),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            stored=stored,
        ),
        head=head_spec(config, layers["attention"], shared["hidden_size"]),
    )


def head_spec(config: JsonMapping, layer: LayerSpec, hidden_size: int) -> DrafterSpec | None:
    """Return the prediction head, which has one layer like the model's layers with attention; None without a head.

    ModelError for several layers, and for a separate embedding.
    """
    for name in HEAD_COUNTS:
        count = integer(config, name, 0)
        if count > 1:
            raise ModelError(f"config.json has {name} = {count}; supported: 0 and 1")
        if count:
            flag_is(config, "mtp_use_dedicated_embeddings", False)
            return DrafterSpec("mtp", (layer,), hidden_elements=hidden_size)
    return None


def delta_net(config: JsonMapping) -> GatedDeltaSpec:
    """Return the mixer of a layer with linear attention. Only configs of GGUF files have `linear_keys_take_turns`."""
    return GatedDeltaSpec(
        num_heads=integer(config, "linear_num_value_heads", 32),
        num_key_heads=integer(config, "linear_num_key_heads", 16),
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        conv_kernel=integer(config, "linear_conv_kernel_dim", 4),
        interleaved_key_heads=flag(config, "linear_keys_take_turns", False),
    )


def mixed_layers(config: JsonMapping, kinds: Mapping[str, str] = KINDS) -> tuple[str, ...]:
    """Return layer kinds from `layer_types`, whose words `kinds` has.

    Without them every fourth layer, or every `full_attention_interval`, has attention.
    """
    named = layer_kinds(config, kinds)
    if named is not None:
        return named
    interval = integer(config, "full_attention_interval", 4, least=1)
    count = integer(config, "num_hidden_layers")
    return tuple("delta_net" if (i + 1) % interval else "attention" for i in range(count))
