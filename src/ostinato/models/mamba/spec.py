"""Mamba and Mamba-2: pure state-space models, one mixer in every layer, without attention or MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ostinato.errors import ModelError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.models.config_json import activation, flag, integer, number, shared_fields, time_step_limit
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.mixers import Mamba1Spec, Mamba2Spec
from ostinato.plan.model import ModelSpec


@dataclass(frozen=True)
class MambaHyperparameters:
    """Hyperparameters of models/mamba/model.py, besides the layers."""

    bias: bool
    conv_bias: bool
    norm_eps: float
    residual_in_float32: bool
    """True if the residual stream is float32 whatever the model's dtype."""
    inner_norm_eps: float | None
    """Epsilon of the norms of time steps, B and C in Falcon-Mamba; None for Mamba, which has no such norms."""


def model_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mamba` config.json."""
    return _selective_spec(config, "mamba", inner_norm_eps=None)


def _selective_spec(config: JsonObject, architecture: str, inner_norm_eps: float | None) -> ModelSpec:
    """Return the spec from the keys that Mamba and Falcon-Mamba have in common.

    Except for their rank, the settings of time steps matter only before training. `use_mambapy` and similar keys choose
    between implementations elsewhere.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    if not flag(config, "rms_norm", True):
        raise ModelError("config.json has rms_norm = false; supported: true, layers that begin with an RMS norm")
    hidden_size = integer(config, "hidden_size")
    layer = LayerSpec(
        "mamba1",
        mixer=Mamba1Spec(
            # Published Falcon-Mamba configs also have an `expand`, which `intermediate_size` overrides.
            channels=integer(config, "intermediate_size", integer(config, "expand", 2) * hidden_size),
            state_size=integer(config, "state_size", 16),
            conv_kernel=integer(config, "conv_kernel", 4),
            time_step_rank=time_step_rank(config, "time_step_rank"),
        ),
    )
    return ModelSpec(
        architecture=architecture,
        **shared_fields(config, default_tied=True),
        layers=(layer,) * integer(config, "num_hidden_layers"),
        rope=None,
        sharded_dims=(),
        hyperparameters=MambaHyperparameters(
            bias=flag(config, "use_bias", False),
            conv_bias=flag(config, "use_conv_bias", True),
            norm_eps=number(config, "layer_norm_epsilon", 1e-5),
            residual_in_float32=flag(config, "residual_in_fp32", True),
            inner_norm_eps=inner_norm_eps,
        ),
    )


def time_step_rank(config: JsonMapping, name: str) -> int:
    """Return the number of inputs of the projection to time steps; `auto` is a sixteenth of the hidden size."""
    if config.get(name) in (None, "auto"):
        return math.ceil(integer(config, "hidden_size") / 16)
    return integer(config, name)


def falcon_mamba_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `falcon_mamba` config.json: RMS norms without weights of time steps, B and C."""
    return _selective_spec(config, "falcon_mamba", inner_norm_eps=number(config, "mixer_rms_eps", 1e-6))


@dataclass(frozen=True)
class Mamba2Hyperparameters:
    """Hyperparameters of models/mamba/model.py, besides the layers."""

    proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float
    residual_in_float32: bool
    """True if the residual stream is float32 whatever the model's dtype."""


def mamba2_spec(config: JsonObject) -> ModelSpec:
    """Return the spec of a `mamba2` config.json. Its `norm_before_gate` is ignored: the gate always comes first."""
    activation(config, "hidden_act", "silu", ("silu",))
    if not flag(config, "rms_norm", True):
        raise ModelError("config.json has rms_norm = false; supported: true, mixers that end with a gated norm")
    layer = LayerSpec("mamba2", mixer=_mamba2_mixer(config))
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


def _mamba2_mixer(config: JsonObject) -> Mamba2Spec:
    mamba2 = Mamba2Spec(
        num_heads=integer(config, "num_heads", 128),
        head_dim=integer(config, "head_dim", 64),
        state_size=integer(config, "state_size", 128),
        num_groups=integer(config, "n_groups", 8),
        conv_kernel=integer(config, "conv_kernel", 4),
        chunk_size=integer(config, "chunk_size", 256),
    )
    inner_size = integer(config, "expand", 2) * integer(config, "hidden_size")
    if mamba2.intermediate_size != inner_size:
        raise ModelError(
            f"config.json has num_heads = {mamba2.num_heads} and head_dim = {mamba2.head_dim}; "
            f"their product should be expand * hidden_size = {inner_size}"
        )
    return mamba2
