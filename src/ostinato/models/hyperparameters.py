"""Helpers for the architecture files: reading a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError
from ostinato.plan.layers import AttentionSpec
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import DTYPE_BYTES


def require(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of `name`; ModelError if config.json has no such key, or null for it."""
    value = config.get(name)
    if value is None:
        raise ModelError(f"config.json has no {name!r}, which a {config.get('model_type')} model needs")
    return value


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a whole number of at least 0. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _malformed(name, value, "a whole number of at least 0")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a number, as float. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _malformed(name, value, "a number")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool | None = None) -> bool:
    """Return True or False. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return value


def text(config: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a string. Without a default the key is required; null counts as absent."""
    value = _value(config, name, default)
    if not isinstance(value, str):
        raise _malformed(name, value, "a string")
    return value


def flag_is(config: Mapping[str, Any], name: str, value: bool) -> None:
    """Raise ModelError if a flag that is set has another value."""
    if flag(config, name, value) is not value:
        raise ModelError(f"config.json has {name} = {config[name]!r}; supported: {str(value).lower()}")


def layer_kinds(
    config: Mapping[str, Any], kinds: Mapping[str, str], names: tuple[str, ...] = ("layer_types",)
) -> tuple[str, ...] | None:
    """Return the kind of each layer, mapped from the words under the first of `names` that is set; None without any.

    ModelError for a word that `kinds` does not have, and if there is not one word per layer.
    """
    name = next((name for name in names if config.get(name)), None)
    if name is None:
        return None
    words, count = config[name], integer(config, "num_hidden_layers")
    if not isinstance(words, list):
        raise _malformed(name, words, "a list of words")
    unknown = sorted({str(word) for word in words if word not in kinds})
    if unknown:
        raise ModelError(f"config.json has {name} {', '.join(unknown)}; supported: {', '.join(kinds)}")
    if len(words) != count:
        raise ModelError(f"config.json has {len(words)} {name} for num_hidden_layers = {count}")
    return tuple(kinds[word] for word in words)


def time_step_limit(config: Mapping[str, Any], name: str = "time_step_limit") -> tuple[float, float]:
    """Return the range of a state layer's time step; infinity is null, a word, or the dict transformers writes."""
    limit = config.get(name)
    if limit is None:
        return 0.0, math.inf
    low, high = (_maybe_infinite(name, value) for value in limit)
    return low, high


def activation(config: Mapping[str, Any], name: str, default: str, supported: tuple[str, ...]) -> str:
    """Return the name of an activation function; ModelError unless it is one of `supported`."""
    value = text(config, name, default)
    if value not in supported:
        raise ModelError(f"config.json has {name} = {value!r}; supported: {', '.join(supported)}")
    return value


def expanded_mamba2_spec(config: Mapping[str, Any], inner_size: int | None = None) -> Mamba2Spec:
    """Return the mixer from the `mamba_*` keys of Bamba, Granite and Falcon-H1.

    `inner_size` is Falcon-H1's `mamba_d_ssm`; without it, `mamba_expand` times the hidden size. ModelError if heads and
    head size do not multiply to it.
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


def attention_spec(config: Mapping[str, Any], head_dim: int | None = None) -> AttentionSpec:
    """Return the attention of the usual keys.

    `head_dim` is the default for a config.json without one; else it is the hidden size divided by the heads.
    """
    num_heads = integer(config, "num_attention_heads")
    if head_dim is None:
        head_dim = integer(config, "hidden_size") // num_heads
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=integer(config, "head_dim", head_dim),
    )


@dataclass(frozen=True)
class HybridHyperparameters:
    """Hyperparameters of attention and mixers that Bamba, Granite and Falcon-H1 have in common."""

    attention_bias: bool
    mamba_proj_bias: bool
    conv_bias: bool
    dt_limit: tuple[float, float]
    norm_eps: float


def hybrid_fields(config: Mapping[str, Any], norm_eps: float) -> dict[str, Any]:
    """Return the fields of HybridHyperparameters; `norm_eps` is the default for a config.json without one."""
    return {
        "attention_bias": flag(config, "attention_bias", False),
        "mamba_proj_bias": flag(config, "mamba_proj_bias", False),
        "conv_bias": flag(config, "mamba_conv_bias", True),
        "dt_limit": time_step_limit(config),
        "norm_eps": number(config, "rms_norm_eps", norm_eps),
    }


def top_k(config: Mapping[str, Any], num_experts: int, default: int | None = None) -> int:
    """Return the number of experts that a router chooses; ModelError if the model has fewer."""
    chosen = integer(config, "num_experts_per_tok", default)
    if not 1 <= chosen <= num_experts:
        raise ModelError(f"config.json has num_experts_per_tok = {chosen}, which should be 1 to {num_experts}")
    return chosen


def grouped_top_k(
    config: Mapping[str, Any],
    num_experts: int,
    names: tuple[str, str, str] = ("num_experts_per_tok", "n_group", "topk_group"),
) -> tuple[int, int, int]:
    """Return (experts that a router chooses, groups of experts, groups that it chooses from).

    ModelError if these groups have fewer experts. `names` are the names of the three in config.json.
    """
    of_chosen, of_groups, of_top = names
    groups, top_groups = integer(config, of_groups, 1), integer(config, of_top, 1)
    if groups < 1 or num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise ModelError(
            f"config.json has {of_groups} = {groups}, which should part {num_experts} experts into groups of 2 or more"
        )
    if not 1 <= top_groups <= groups:
        raise ModelError(f"config.json has {of_top} = {top_groups}, which should be 1 to {groups}")
    chosen, allowed = integer(config, of_chosen), num_experts // groups * top_groups
    if not 1 <= chosen <= allowed:
        raise ModelError(
            f"config.json has {of_chosen} = {chosen}, which should be 1 to {allowed}, the experts of "
            f"{top_groups} of {groups} groups"
        )
    return chosen, groups, top_groups


def shared_fields(config: Mapping[str, Any], default_tied: bool = False) -> dict[str, Any]:
    """Return the fields of a ModelSpec that every architecture has under the same keys."""
    return {
        "dtype": checkpoint_dtype(config),
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": integer(config, "hidden_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "tied_embeddings": flag(config, "tie_word_embeddings", default_tied),
        "ssm_state_dtype": config.get("mamba_ssm_cache_dtype"),
    }


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Return config.json's `dtype` or `torch_dtype`; float32 if it has neither, as in transformers."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"config.json has dtype {dtype!r}; the supported ones are {', '.join(DTYPE_BYTES)}")
    return dtype


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
