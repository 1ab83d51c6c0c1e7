"""gpt-oss: attention with sinks, every other layer with a window, and experts with biases and a clamped activation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import (
    activation,
    attention_spec,
    flag,
    integer,
    layer_windows,
    number,
    parse_rope,
    respelled,
    shared_fields,
    usual_experts,
)
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.model import ModelSpec

HEAD_DIM, WINDOW, THETA, EPS = 64, 128, 150_000.0, 1e-5
"""Defaults of a config.json without these values."""

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary embedding of a config.json without one."""


@dataclass(frozen=True)
class GptOssHyperparameters:
    """Hyperparameters of models/gpt_oss/model.py, besides the layers. `clamp` is that of `ops.moe`."""

    attention_bias: bool
    norm_eps: float
    clamp: tuple[float, float, float]


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `gpt_oss` config.json.

    Without a dtype, what a quantised checkpoint leaves unquantised is bfloat16. ModelError for a limit that is not
    above 0.
    """
    config = respelled(config, {"num_experts": "num_local_experts"})
    activation(config, "hidden_act", "silu", ("silu",))
    if config.get("quantization_config") and not config.get("dtype") and not config.get("torch_dtype"):
        config = {**config, "dtype": "bfloat16"}
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = {**config, "rope_scaling": ROPE}
    attention = replace(attention_spec(config, HEAD_DIM), has_sinks=True)
    windows = layer_windows(config, [i % 2 == 0 for i in range(integer(config, "num_hidden_layers"))], WINDOW)
    experts = usual_experts(config, integer(config, "num_local_experts"))
    alpha, limit = number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)
    if not limit > 0:
        raise ModelError(f"config.json has swiglu_limit = {limit}, which should be above 0")
    return ModelSpec(
        architecture="gpt_oss",
        **shared_fields(config),
        layers=tuple(LayerSpec("attention", replace(attention, window=window), None, experts) for window in windows),
        rope=parse_rope(config, attention.head_dim, default_theta=THETA),
        sharded_dims=(),
        hyperparameters=GptOssHyperparameters(
            attention_bias=flag(config, "attention_bias", True),
            norm_eps=number(config, "rms_norm_eps", EPS),
            clamp=(alpha, limit, 1.0),
        ),
    )
