"""Rotary position embedding of a config.json.

Two spellings exist: `rope_theta`, `rope_scaling` and `partial_rotary_factor` as separate keys, and one dict
`rope_parameters` with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ostinato.errors import ModelError
from ostinato.models.hyperparameters import flag, integer, number
from ostinato.plan.rope import RopeSpec

DEFAULT_THETA = 10000.0
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "factors")

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "dynamic": ("factor",),
    "factors": (),
}
_OPTIONAL = {"yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


def parse_rope(
    config: Mapping[str, Any], head_dim: int, default_partial: float = 1.0, default_theta: float = DEFAULT_THETA
) -> RopeSpec:
    """Return the rotary embedding of a model with heads of `head_dim` elements, `default_partial` of them rotated.

    ModelError for a kind that is not supported, for one that differs between layers, for a missing factor.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError("config.json gives each kind of layer its own rotary embedding; one for all is supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelError(f"rope type {kind!r} is not supported; the supported ones are {known}")
    merged = {**config, **{name: value for name, value in scaling.items() if value is not None}}
    partial = number(merged, "partial_rotary_factor", default_partial)
    theta = number(merged, "rope_theta", default_theta)
    parameters: dict[str, Any] = {name: number(scaling, name) for name in _REQUIRED[kind]}
    parameters |= {name: scaling[name] for name in _OPTIONAL.get(kind, ()) if scaling.get(name) is not None}
    original = _original_max_position(config, scaling, kind)
    if kind == "yarn" and "factor" not in parameters:
        parameters["factor"] = integer(config, "max_position_embeddings") / original
    rotary_dim = int(head_dim * partial)
    if kind == "factors":
        parameters["factors"] = _factors(scaling, rotary_dim // 2)
    return RopeSpec(kind, theta, rotary_dim, original, parameters)


def _factors(scaling: Mapping[str, Any], count: int) -> list[float]:
    """Return the divisors of the frequencies, as GGUF files store them.

    ModelError unless there is one above 0 for each frequency.
    """
    factors = scaling.get("factors")
    if not isinstance(factors, list) or len(factors) != count or not all(factor > 0 for factor in factors):
        raise ModelError(f"rope type 'factors' has {factors!r}, which should be {count} numbers above 0")
    return factors


def with_sections(rope: RopeSpec, scaling: Mapping[str, Any], default: tuple[int, int, int]) -> RopeSpec:
    """Return `rope` with the sections of time, height and width from `scaling`, config.json's dict on it.

    ModelError if there are not three sections, and if they are not interleaved.
    """
    if not flag(scaling, "mrope_interleaved", True):
        raise ModelError("config.json has mrope_interleaved = false; supported: true")
    given = scaling.get("mrope_section")
    sections = default if given is None else given
    is_list = isinstance(sections, list | tuple)
    if not is_list or len(sections) != 3 or not all(type(size) is int and size >= 0 for size in sections):
        raise ModelError(f"config.json has mrope_section = {sections!r}, which should be three whole numbers")
    time, height, width = sections
    return replace(rope, sections=(time, height, width))


def _original_max_position(config: Mapping[str, Any], scaling: Mapping[str, Any], kind: str) -> int:
    """Return the length that the unscaled frequencies were trained for.

    It is 0 if the kind does not depend on it and config.json does not give it.
    """
    if kind in ("llama3", "yarn"):
        # As in transformers, the outer key overrides the one in the scaling's dict.
        for source in (config, scaling):
            if source.get("original_max_position_embeddings") is not None:
                return integer(source, "original_max_position_embeddings")
        return integer(config, "max_position_embeddings")
    if kind == "dynamic":
        return integer(config, "max_position_embeddings")
    return integer(config, "max_position_embeddings", 0)
