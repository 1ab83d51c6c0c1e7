"""Helpers for the architecture files: reading a config.json, and counting parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ostinato.errors import ModelError
from ostinato.plan.model import AttentionSpec, Mamba2Spec
from ostinato.plan.quantization import LinearSpec


def require(config: Mapping[str, Any], name: str) -> Any:
    """The value of `name`; ModelError if config.json has no such key or has null there."""
    value = config.get(name)
    if value is None:
        raise ModelError(f"config.json has no {name!r}, which a {config.get('model_type')} model needs")
    return value


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of at least 0. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _malformed(name, value, "a whole number of at least 0")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number, as float. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _malformed(name, value, "a number")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool | None = None) -> bool:
    """True or false. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return value


def text(config: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A string. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if not isinstance(value, str):
        raise _malformed(name, value, "a string")
    return value


def time_step_limit(config: Mapping[str, Any], name: str = "time_step_limit") -> tuple[float, float]:
    """The range of a state layer's time step; infinity is null, a word, or the dict transformers writes."""
    limit = config.get(name)
    if limit is None:
        return 0.0, math.inf
    low, high = (_maybe_infinite(name, value) for value in limit)
    return low, high


def activation(config: Mapping[str, Any], name: str, default: str, supported: tuple[str, ...]) -> str:
    """The name of an activation function; ModelError unless it is one of `supported`."""
    value = text(config, name, default)
    if value not in supported:
        raise ModelError(f"config.json has {name} = {value!r}; supported: {', '.join(supported)}")
    return value


def expanded_mamba2_spec(config: Mapping[str, Any], inner_size: int | None = None) -> Mamba2Spec:
    """The mixer as Bamba, Granite and Falcon-H1 spell it, in `mamba_*` keys.

    `inner_size` is Falcon-H1's `mamba_d_ssm`; without it, `mamba_expand` times the hidden size. ModelError if
    heads and head size do not multiply to it.
    """
    name = "mamba_d_ssm"
    if inner_size is None:
        name = "mamba_expand * hidden_size"
        inner_size = integer(config, "mamba_expand", 2) * integer(config, "hidden_size")
    num_heads = integer(config, "mamba_n_heads", 128)
    automatic = config.get("mamba_d_head") in (None, "auto")
    head_dim = inner_size // max(num_heads, 1) if automatic else integer(config, "mamba_d_head")
    if num_heads * head_dim != inner_size:
        raise ModelError(
            f"config.json has mamba_n_heads = {num_heads} and mamba_d_head = {config.get('mamba_d_head')!r}; "
            f"their product should be {name} = {inner_size}"
        )
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=integer(config, "mamba_d_state", 256),
        num_groups=integer(config, "mamba_n_groups", 1),
        conv_kernel=integer(config, "mamba_d_conv", 4),
        chunk_size=integer(config, "mamba_chunk_size", 256),
    )


def linear_parameters(in_features: int, out_features: int, bias: bool = False) -> int:
    return in_features * out_features + (out_features if bias else 0)


def attention_parameters(hidden_size: int, attention: AttentionSpec, bias: bool = False, qk_norm: bool = False) -> int:
    """Query, key, value and output projections, all with a bias or none, and the norms over heads, if any."""
    query_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    return (
        linear_parameters(hidden_size, query_size, bias)
        + 2 * linear_parameters(hidden_size, kv_size, bias)
        + linear_parameters(query_size, hidden_size, bias)
        + (2 * attention.head_dim if qk_norm else 0)
    )


def mamba2_parameters(
    hidden_size: int,
    mamba2: Mamba2Spec,
    proj_bias: bool = False,
    conv_bias: bool = True,
    norm: bool = True,
    out_bias: bool | None = None,
) -> tuple[int, int]:
    """(parameters in the model's dtype, parameters in float32) of one Mamba-2 mixer, its block's norm aside.

    The first: input and output projection, convolution and gated norm; the second: A_log, D and dt_bias.
    `out_bias` is the output projection's, where it differs from `proj_bias`.
    """
    out_bias = proj_bias if out_bias is None else out_bias
    parameters = (
        linear_parameters(hidden_size, mamba2.in_proj_size, proj_bias)
        + mamba2.conv_dim * (mamba2.conv_kernel + (1 if conv_bias else 0))
        + (mamba2.intermediate_size if norm else 0)
        + linear_parameters(mamba2.intermediate_size, hidden_size, out_bias)
    )
    return parameters, 3 * mamba2.num_heads


def mlp_parameters(hidden_size: int, intermediate_size: int, gated: bool = True, bias: bool = False) -> int:
    """Up and down projection, and the gate's if there is one."""
    inward = linear_parameters(hidden_size, intermediate_size, bias)
    return (2 if gated else 1) * inward + linear_parameters(intermediate_size, hidden_size, bias)


def attention_linears(hidden_size: int, attention: AttentionSpec, module: str) -> tuple[LinearSpec, ...]:
    """The matrices of an attention that the checkpoint calls `module`: queries, keys and values share one."""
    query_size = attention.num_heads * attention.head_dim
    inward = tuple(f"{module}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    return (
        LinearSpec(inward, hidden_size, query_size + 2 * attention.num_kv_heads * attention.head_dim),
        LinearSpec((f"{module}.o_proj",), query_size, hidden_size),
    )


def mamba2_linears(hidden_size: int, mamba2: Mamba2Spec, module: str) -> tuple[LinearSpec, ...]:
    """The matrices of a Mamba-2 mixer that the checkpoint calls `module`."""
    return (
        LinearSpec((f"{module}.in_proj",), hidden_size, mamba2.in_proj_size),
        LinearSpec((f"{module}.out_proj",), mamba2.intermediate_size, hidden_size),
    )


def mlp_linears(hidden_size: int, intermediate_size: int, module: str, gated: bool = True) -> tuple[LinearSpec, ...]:
    """The matrices of an MLP that the checkpoint calls `module`: gate and up projection share one."""
    inward = tuple(f"{module}.{name}" for name in (("gate_proj", "up_proj") if gated else ("up_proj",)))
    return (
        LinearSpec(inward, hidden_size, len(inward) * intermediate_size),
        LinearSpec((f"{module}.down_proj",), intermediate_size, hidden_size),
    )


def expert_linears(
    size: int,
    intermediate_size: int,
    num_experts: int,
    names: tuple[str, ...],
    gated: bool = True,
    stacked: bool = False,
) -> tuple[LinearSpec, LinearSpec]:
    """The matrices of a layer's experts, inward (with a gate's, if there is one) and outward; `names` are of both."""
    inner = 2 * intermediate_size if gated else intermediate_size
    return (
        LinearSpec(names, size, num_experts * inner, stacked),
        LinearSpec(names, intermediate_size, num_experts * size, stacked),
    )


def _maybe_infinite(name: str, value: Any) -> float:
    if value is None:
        return math.inf
    try:
        return float(value["__float__"] if isinstance(value, Mapping) else value)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(name, value, "a number or Infinity") from error


def _value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    if default is None:
        return require(config, name)
    value = config.get(name)
    return default if value is None else value


def _malformed(name: str, value: Any, expected: str) -> ModelError:
    return ModelError(f"config.json has {name} = {value!r}, which should be {expected}")
