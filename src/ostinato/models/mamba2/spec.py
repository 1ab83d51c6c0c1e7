"""Mamba-2: a pure state-space model, one mixer in every layer, without attention or MLP."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonObject
from ostinato.models.config_json import activation, flag, integer, number, shared_fields, time_step_limit
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class Mamba2Hyperparameters:
    """Hyperparameters of models/mamba/model.py, besides the layers."""

    proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float
    residual_in_float32: bool
    """True if the residual stream is float32 whatever the model's dtype."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mamba2` config.json. Its `norm_before_gate` is ignored: the gate always comes first."""
    activation(config, "hidden_act", "silu", ("silu",))
    if not flag(config, "rms_norm", True):
        raise ModelError("config.json has rms_norm = false; supported: true, mixers that end with a gated norm")
    mixer = _mixer(config, integer(config, "hidden_size"))
    layer = LayerSpec("mamba2", mixer=mixer)
    return ModelSpec(
        architecture="mamba2",
        **shared_fields(config),
        layers=(layer,) * integer(config, "num_hidden_layers"),
        rope=None,
        sharded_dims=(),
        hyperparameters=Mamba2Hyperparameters(
            proj_bias=flag(config, "use_bias", False),
            conv_bias=flag(config, "use_conv_bias", True),
            dt_limit=time_step_limit(config),
            norm_eps=number(config, "layer_norm_epsilon", 1e-5),
            residual_in_float32=flag(config, "residual_in_fp32", True),
        ),
    )


def _mixer(config: JsonObject, hidden_size: int) -> Mamba2Spec:
    mamba2 = Mamba2Spec(
        num_heads=integer(config, "num_heads", 128),
        head_dim=integer(config, "head_dim", 64),
        state_size=integer(config, "state_size", 128),
        num_groups=integer(config, "n_groups", 8),
        conv_kernel=integer(config, "conv_kernel", 4),
        chunk_size=integer(config, "chunk_size", 256),
    )
    inner_size = integer(config, "expand", 2) * hidden_size
    if mamba2.intermediate_size != inner_size:
        raise ModelError(
            f"config.json has num_heads = {mamba2.num_heads} and head_dim = {mamba2.head_dim}; "
            f"their product should be expand * hidden_size = {inner_size}"
        )
    return mamba2
