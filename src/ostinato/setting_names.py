"""Other engines' names and values for settings, and the messages for a setting that is refused.

`help()` shows pydantic fields with the texts from here.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ostinato.errors import ConfigError, Remedy, validation_problem

Model = TypeVar("Model", bound=BaseModel)


def describe_fields(model: type[Model]) -> type[Model]:
    """Add each field with its default and description to the docstring, which is all that `help()` shows of it."""
    lines = ["", "", "Fields:", ""]
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
        lines.append(f"{name}{default}")
        lines += textwrap.wrap(field.description or "", 100, initial_indent="    ", subsequent_indent="    ")
    model.__doc__ = inspect.cleandoc(model.__doc__ or "") + "\n".join(lines)
    return model


ALIASES = {
    "mamba_ssm_cache_dtype": "ssm_state_dtype",
    "gpu_memory_utilization": "memory_utilization",
    "kv_cache_memory_bytes": "cache_memory",
    "mamba_cache_mode": "state_cache_mode",
    "mamba_block_size": "state_block_size",
    "cudagraph_capture_sizes": "capture_sizes",
    "max_cudagraph_capture_size": "max_capture_size",
    "speculative_config": "speculative",
    "encoder_cudagraph_token_budgets": "encoder_token_budgets",
    "encoder_cudagraph_max_vision_items_per_batch": "encoder_max_items_per_batch",
}
"""vLLM's names for settings of the same meaning. They work wherever a setting is named."""

UNSUPPORTED_SETTINGS = {
    "enforce_eager": "here it is graph_mode='none'",
    "trust_remote_code": "leave it out; no code of a checkpoint is ever run",
    "swap_space": "leave it out; requests that lose their memory are computed again",
    "disable_log_stats": "leave it out; stats() has them",
}
"""vLLM's names for settings that do not exist here -> advice what to use instead."""

KV_CACHE_DTYPES = {
    **dict.fromkeys(
        ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
        ("int8", "8-bit keys and values are int8, which keeps more of each number in as many bytes"),
    ),
    "q8_0": ("int8", "8-bit keys and values are int8, with one scale for each token's head"),
    **dict.fromkeys(
        ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"), ("int8", "keys and values have no fewer than 8 bits, as int8")
    ),
    **dict.fromkeys(
        ("f32", "f16", "bf16", "float32", "float16", "bfloat16"),
        ("auto", "keys and values that are not int8 have the dtype of the model (dtype)"),
    ),
}
"""Values of `kv_cache_dtype` in vLLM and llama.cpp -> the value to use here, and why."""


def by_canonical_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by the names that they have here. ConfigError if one is given under both its names."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        canonical = ALIASES.get(name, name)
        if canonical in named:
            alias = next(alias for alias, setting in ALIASES.items() if setting == canonical)
            raise ConfigError(f"{canonical} and {alias} are two names of one setting; give one of them")
        named[canonical] = value
    return named


def config_error(problems: list[ErrorDetails], settings: Iterable[str]) -> ConfigError:
    """Return an error with all problems, one per line, and the nearest legal values. `settings` are the known names."""
    lines, remedies = [], []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown_setting(name, settings))
            continue
        text, nearest = validation_problem(problem)
        if name == "kv_cache_dtype" and str(problem["input"]) in KV_CACHE_DTYPES:
            there_is, why = KV_CACHE_DTYPES[problem["input"]]
            text, nearest = f"{name} = {problem['input']!r}: {why}", [Remedy(name, there_is)]
        lines.append(problem["msg"] if problem["type"] in ("capture_sizes", "speculative") else text)
        if name == "memory_utilization" and problem["type"] == "greater_than":
            nearest = [Remedy(name, 0.01)]
        if name == "cache_offload":
            nearest = [Remedy(name, None)]  # only the plan knows how many bytes are enough
        remedies += nearest
    return ConfigError("\n".join(lines), remedies)


def _unknown_setting(name: str, settings: Iterable[str]) -> str:
    if name in UNSUPPORTED_SETTINGS:
        return f"{name} is not a setting: {UNSUPPORTED_SETTINGS[name]}"
    known = [*settings, *ALIASES]
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the known ones are {', '.join(known)}"
    return f"{name} is not a setting: {hint}"
