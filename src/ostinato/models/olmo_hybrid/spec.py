"""OLMo Hybrid: a gated delta net or attention, then a gated MLP, in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import activation, attention_spec, flag, integer, number, parse_rope, shared_fields
from ostinato.models.qwen3_5_text.spec import mixed_layers
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import GatedDeltaSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.rope import RopeSpec


@dataclass(frozen=True)
class OlmoHybridHyperparameters:
    """Hyperparameters of models/olmo_hybrid/model.py, besides the layers. `beta_scale` is 2 if beta may reach 2."""

    intermediate_size: int
    attention_bias: bool
    beta_scale: float
    norm_eps: float


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of an `olmo_hybrid` config.json."""
    activation(config, "hidden_act", "silu", ("silu",))
    size = integer(config, "hidden_size")
    # The architecture ignores `head_dim`.
    attention = attention_spec({key: value for key, value in config.items() if key != "head_dim"})
    layers = {
        "attention": LayerSpec("attention", attention),
        "delta_net": LayerSpec("delta_net", mixer=_delta_net(config, size, attention.num_heads)),
    }
    return ModelSpec(
        architecture="olmo_hybrid",
        **shared_fields(config),
        layers=tuple(layers[kind] for kind in _kinds(config)),
        rope=_rope(config, attention.head_dim),
        sharded_dims=("intermediate_size",),
        hyperparameters=OlmoHybridHyperparameters(
            intermediate_size=integer(config, "intermediate_size"),
            attention_bias=flag(config, "attention_bias", False),
            beta_scale=2.0 if flag(config, "linear_allow_neg_eigval", True) else 1.0,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        ),
    )


def _kinds(config: JsonMapping) -> tuple[str, ...]:
    """Return layer kinds: by default every fourth layer has attention, or else the last."""
    kinds = mixed_layers({key: value for key, value in config.items() if key != "full_attention_interval"})
    if config.get("layer_types") is None and "attention" not in kinds:
        return (*kinds[:-1], "attention")
    return kinds


def _delta_net(config: JsonMapping, hidden_size: int, num_heads: int) -> GatedDeltaSpec:
    num_key_heads = integer(config, "linear_num_key_heads", num_heads, least=1)
    key_dim = integer(config, "linear_key_head_dim", int(0.75 * hidden_size / num_key_heads))
    return GatedDeltaSpec(
        num_heads=integer(config, "linear_num_value_heads", num_heads),
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=integer(config, "linear_value_head_dim", 2 * key_dim),
        conv_kernel=integer(config, "linear_conv_kernel_dim", 4),
    )


def _rope(config: JsonMapping, head_dim: int) -> RopeSpec | None:
    """Return the rotary embedding; None if config.json's theta is null, which means attention without positions."""
    parameters = config.get("rope_parameters") or {}
    of_theta = parameters if "rope_theta" in parameters else config
    if "rope_theta" in of_theta and of_theta["rope_theta"] is None:
        return None
    return parse_rope(config, head_dim)
