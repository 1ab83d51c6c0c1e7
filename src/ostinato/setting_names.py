"""vLLM's names that work for settings, and the messages for a setting that is refused.

`help()` shows pydantic fields with the texts from here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from ostinato.errors import ConfigError, Remedy, short_repr
from ostinato.other_engines import SETTING_ADVICE, other_value
from ostinato.units import number_in

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


def plain_numbers(value: Any) -> Any:
    """Return `value` with Python's own numbers in place of numpy's, also inside lists, tuples, sets and dictionaries.

    Arrays and tensors become numbers and lists. Fields are strict, so that True is no number and 1.5 no whole one; this
    keeps it so.
    """
    if isinstance(value, (bool, int, float, str)) or value is None:
        return float(value) if isinstance(value, float) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy's booleans too
        return value.tolist()
    try:
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(plain_numbers, value))
        if type(value) is dict:
            return {plain_numbers(key): plain_numbers(entry) for key, entry in value.items()}
    except RecursionError:  # of what holds itself, which the field refuses
        pass
    return value


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

_SWITCHES = {
    **dict.fromkeys(("on", "true", "yes", "1", "enable", "enabled"), True),
    **dict.fromkeys(("off", "false", "no", "0", "none", "disable", "disabled"), False),
}


def nearest_value(name: str, given: object, kind: str, expected: Iterable[str] = ()) -> Any:
    """Return the value that was probably meant by `given`, which is none of the setting `name`; None without a guess.

    `kind` is pydantic's type of the problem. `expected` are the values of a setting that has names for them.
    """
    if isinstance(given, list | tuple | dict):
        return None
    word = str(given).strip().lower()
    if kind == "literal_error":
        known = {value.lower(): value for value in expected}
        switch = {True: "on", False: "off", None: None}[_SWITCHES.get(word)]
        near = [known[word]] if word in known else get_close_matches(word, known, 1)
        return (
            other_value(name, word)[0]
            or (switch if switch in known else None)
            or (known[near[0].lower()] if near else None)
        )
    if kind.startswith("bool_"):
        return _SWITCHES.get(word)
    if not kind.startswith(("int_", "float_")) or isinstance(given, bool):
        return None
    number = number_in(word, is_time=name.endswith(("_timeout", "_seconds", "timeout")))
    if number is None or kind.startswith("float_"):
        return number
    return int(number) if number == int(number) else None


_PYDANTIC_WORDS = {
    r"^(Input|String|List|Tuple|Set|Frozenset|Dictionary|Value) should ": "should ",
    r" after validation.*$": "",
    r"^(should .*?), (unable to|got a number with|but was|not) .*$": r"\1",
    r"greater than or equal to": "at least",
    r"less than or equal to": "at most",
    r"greater than": "more than",
    r"a valid (dictionary|mapping)( or .*| object.*)?$|an object or instance of .*$|an instance of .*$": "an object",
    r"a valid integer": "a whole number",
    r"a valid (list|tuple|set|frozenset)": "a list",
    r"a valid (number|URL|decimal|date)": r"a \1",
    r"a valid string": "text",
    r"a valid boolean": "true or false",
    r"a finite number": "a number that is finite",
    r"^Field required": "is required",
    r"^Extra inputs are not permitted": "is not known",
}
"""Pattern in messages of pydantic and of the command line's library -> our words."""
_PYDANTIC_TYPES = frozenset(get_args(ErrorType))
_RAISED = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}
"""pydantic's type of a problem that a validator raised -> what it writes before that message."""


def plain_words(found: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's problems: its own in plain words, one of our validators as it is."""
    kind, message = found["type"], str(found["msg"])
    if kind in _RAISED:
        return message.removeprefix(_RAISED[kind])
    return in_plain_words(message) if kind in _PYDANTIC_TYPES else message


def in_plain_words(text: str) -> str:
    """Return a library's message about a value in plain words, without what the value was."""
    for pattern, words in _PYDANTIC_WORDS.items():
        text = re.sub(pattern, words, text)
    return text


def validation_problem(found: Mapping[str, Any], equals: str = " = ") -> tuple[str, list[Remedy]]:
    """Return pydantic's problem with one setting as text, and the nearest legal value as a remedy, if there is one."""
    # A wrong key of an object is the problem's input: pydantic marks its location by `[key]`.
    loc = found["loc"][:-2] if found["loc"][-1:] == ("[key]",) else found["loc"]
    name, said = ".".join(map(str, loc)), plain_words(found)
    about, given = found.get("ctx", {}), found.get("input")  # a secret is hidden
    nearest = [about[key] for key in ("nearest", "ge", "le") if key in about]
    if about.get("le") == 1 and isinstance(given, int | float) and 2 < given <= 100:
        nearest = [given / 100]  # a percentage
    guess = nearest_value(name, given, found["type"], re.findall("'([^']+)'", str(about.get("expected", ""))))
    shown = type(given).__name__ if isinstance(given, BaseModel) else short_repr(given)
    text = f"{name}{equals}{shown}: {said}" if name else said
    if guess is not None and not nearest:
        why = other_value(name, str(given).lower())[1]
        text += f"; {why + ': ' if why else ''}did you mean {str(guess).lower() if isinstance(guess, bool) else guess}?"
        nearest = [guess]
    return text, [*about.get("remedies", ()), *(Remedy(name, value) for value in nearest[:1])]


def by_canonical_name(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings by the names that they have here. ConfigError if one is given under both its names."""
    named: dict[str, object] = {}
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
        lines.append(problem["msg"] if problem["type"] in ("capture_sizes", "speculative") else text)
        if name == "memory_utilization" and problem["type"] == "greater_than":
            nearest = [Remedy(name, 0.01)]
        if name == "cache_offload":
            nearest = [Remedy(name, None)]  # only the plan knows how many bytes are enough
        remedies += nearest
    return ConfigError("\n".join(lines), remedies)


def _unknown_setting(name: str, settings: Iterable[str]) -> str:
    if name in SETTING_ADVICE:
        return f"{name} is not a setting: {SETTING_ADVICE[name]}"
    known = [*settings, *ALIASES]
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the known ones are {', '.join(known)}"
    return f"{name} is not a setting: {hint}"
