"""Mamba-2: a pure state-space model, one mixer in every layer, without attention or MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.checkpoint import checkpoint_dtype
from ostinato.models.hyperparameters import (
    activation,
    flag,
    integer,
    mamba2_linears,
    mamba2_parameters,
    number,
    time_step_limit,
)
from ostinato.plan.model import LayerSpec, Mamba2Spec, ModelSpec


@dataclass(frozen=True)
class Mamba2Hyperparameters:
    """What models/mamba2/model.py builds from."""

    mamba2: Mamba2Spec
    proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float
    residual_in_float32: bool
    """Whether the residual stream is float32 whatever the model's dtype is."""


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a `mamba2` config.json.

    Its `norm_before_gate`, which some checkpoints on the hub have, says nothing: the gate always comes first.
    """
    activation(config, "hidden_act", "silu", ("silu",))
    if not flag(config, "rms_norm", True):
        raise ModelError("config.json has rms_norm = false; supported: true, mixers that end with a gated norm")
    hidden_size, vocab_size = integer(config, "hidden_size"), integer(config, "vocab_size")
    hyper = Mamba2Hyperparameters(
        mamba2=_mixer(config, hidden_size),
        proj_bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", True),
        dt_limit=time_step_limit(config),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        residual_in_float32=flag(config, "residual_in_fp32", True),
    )
    tied = flag(config, "tie_word_embeddings", False)
    return ModelSpec(
        architecture="mamba2",
        dtype=checkpoint_dtype(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=config.get("max_position_embeddings"),
        tied_embeddings=tied,
        layers=(_layer(hyper, hidden_size),) * integer(config, "num_hidden_layers"),
        outer_parameters=vocab_size * hidden_size * (1 if tied else 2) + hidden_size,
        ssm_state_dtype=config.get("mamba_ssm_cache_dtype"),
        rope=None,
        ops=("causal_conv1d", "embedding", "gated_rms_norm", "linear", "rms_norm", "ssd_scan", "state_update"),
        hyperparameters=hyper,
    )


def _mixer(config: dict[str, Any], hidden_size: int) -> Mamba2Spec:
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


def _layer(hyper: Mamba2Hyperparameters, hidden_size: int) -> LayerSpec:
    spec = hyper.mamba2
    parameters, float32 = mamba2_parameters(
        hidden_size, spec, proj_bias=hyper.proj_bias, conv_bias=hyper.conv_bias, norm=True
    )
    width = spec.in_proj_size + spec.conv_dim + 2 * spec.intermediate_size
    linears = mamba2_linears(hidden_size, spec, "mixer")
    return LayerSpec("mamba2", None, spec, parameters + hidden_size, float32, width, linears=linears)
