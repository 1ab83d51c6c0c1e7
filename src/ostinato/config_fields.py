"""Settings with a structure of their own: lists of sizes, and `speculative`.

The lists are capture sizes and the budgets of a vision encoder's graphs. `speculative` has methods, fields, and a short
form as text. Settings can be written as flags of the command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_serializer

from ostinato.errors import ConfigError, Remedy, short_repr
from ostinato.json_io import DuplicateMemberError, parse_json

BUDGETS = "encoder_token_budgets"

_EMPTY = {BUDGETS: "the default ones, or set encoder_graph_mode to none"}
_SIZE = {BUDGETS: "a budget is a whole number of tokens, at least 1"}


def checked_sizes(setting: str, given: object, max_capture_size: object = None) -> tuple[int, ...]:
    """Return the given sizes in ascending order, each once.

    ConfigError if there are none, one is not a size, or the largest is not `max_capture_size`, where that is given too.
    """
    if isinstance(given, str | bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        message = f"{setting} = {short_repr(given)} is not a list of whole numbers"
        raise ConfigError(message, [Remedy(setting, _repaired([given], max_capture_size))])
    values = list(given)
    repair = Remedy(setting, _repaired(values, max_capture_size))
    if not values:
        otherwise = _EMPTY.get(setting, "the default sizes, or set graph_mode to none")
        raise ConfigError(f"{setting} is an empty list; leave it open for {otherwise}", [repair])
    wrong = [short_repr(value) for value in values if not is_count(value)]
    if wrong:
        what = _SIZE.get(setting, "a capture size is a whole number of at least 1")
        raise ConfigError(f"{setting} has {', '.join(wrong)}: {what}", [repair])
    sizes = ascending(values)
    if max_capture_size is not None and max_capture_size != sizes[-1]:
        message = f"max_capture_size {max_capture_size!r} is not the largest of the given {setting}, {sizes[-1]}"
        remedies = [Remedy("max_capture_size", sizes[-1])]
        raise ConfigError(message, [*remedies, repair] if is_count(max_capture_size) else remedies)
    return sizes


def ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes in ascending order, each once."""
    return tuple(sorted(set(sizes)))


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    # True and False are ints to Python, and mistakes here.
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _repaired(given: Iterable[Any], max_capture_size: Any) -> list[int] | None:
    """Return the nearest legal list; None (open) if no size is left.

    Its largest size is `max_capture_size` where that is given.
    """
    sizes = {value for value in given if is_count(value)}
    if sizes and is_count(max_capture_size):
        sizes = {size for size in sizes if size < max_capture_size} | {max_capture_size}
    return sorted(sizes) or None


def flag_name(setting: str) -> str:
    """Return a setting's flag: `max_num_seqs` is `--max-num-seqs`."""
    return "--" + setting.replace("_", "-")


def flag_value(value: object) -> str:
    """Return a setting's value as the text that its flag takes."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def setting_flags(settings: Mapping[str, object]) -> list[str]:
    """Return settings as arguments of a command: a flag and its value, or a flag alone for True and False."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(flag_name(name if value else f"no_{name}"))
        else:
            flags += [flag_name(name), flag_value(value)]
    return flags


METHODS = {"ngram": "ngram:4", "mtp": "mtp:3", "draft": "draft:PATH:4"}
"""Methods, each with an example of its short form."""

LOOKUPS = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
"""Fields of method ngram, with their defaults."""

FIELDS = ("method", "num_speculative_tokens", "model", *LOOKUPS)
FORMS = "write it as ngram:4, mtp:3 or draft:PATH:4"
NOTHING = ("", "none", "null", "off", "false")
"""Words that people write for no speculation, in lower case."""


class Speculative(BaseModel):
    """Speculation setting: `method` drafts `num_speculative_tokens` tokens ahead, which one step then verifies.

    `ngram` copies what followed the last occurrence of the text's end, of at most `prompt_lookup_max` and at least
    `prompt_lookup_min` tokens; `mtp` is the model's own prediction head; `draft` is the smaller checkpoint `model`.
    Fields that are missing, malformed or another method's are a ConfigError.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["ngram", "mtp", "draft"]
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int = LOOKUPS["prompt_lookup_max"]
    prompt_lookup_min: int = LOOKUPS["prompt_lookup_min"]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**speculative_fields(fields))

    def with_tokens(self, count: int) -> str | dict[str, object]:
        """Return the value of `speculative` for `count` tokens and otherwise the same fields."""
        return short_form(dict(self) | {"num_speculative_tokens": count})

    @model_serializer
    def as_given(self) -> str | dict[str, object]:
        """Return the value of `speculative` that a user would give for these fields."""
        return short_form(dict(self))


def speculative_fields(given: object) -> dict[str, object]:
    """Return the checked fields of `speculative`, given as an object, its JSON, or in short form.

    ConfigError that lists all problems; its remedy is the nearest legal value, if there is one.
    """
    if given is False or (isinstance(given, str) and given.strip().lower() in NOTHING):
        message = f"speculative = {short_repr(given)}: leave it out for no speculation, else {FORMS}"
        raise ConfigError(message, [Remedy("speculative", None)])
    try:
        fields = _of_text(given) if isinstance(given, str) else given
    except DuplicateMemberError as error:
        raise ConfigError(f"speculative = {short_repr(given)}: {error}; {FORMS}") from None
    if not isinstance(fields, Mapping):
        raise ConfigError(f"speculative = {short_repr(given)}: {FORMS}")
    fields = {str(name): value for name, value in fields.items() if value is not None}
    repaired, problems = dict(fields), list[str]()
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        problems.append(f"{' and '.join(unknown)} {_are(unknown)} none of {', '.join(FIELDS)}")
        repaired = {name: value for name, value in fields.items() if name in FIELDS}
    method = _check_method(fields, repaired, problems)
    _check_count(fields, repaired, problems, METHODS.get(method or "", "mtp:3"))
    if method is not None:
        _check_model(method, fields, repaired, problems)
        _check_lookups(method, fields, repaired, problems)
    if problems:
        remedies = [Remedy("speculative", short_form(repaired))] if _is_complete(repaired) else []
        raise ConfigError(f"speculative = {short_repr(given)}: {'; '.join(problems)}; {FORMS}", remedies)
    return repaired


def short_form(fields: Mapping[str, object]) -> str | dict[str, object]:
    """Return legal fields as text such as `mtp:3`, or as a dict without defaults if text cannot hold all of them."""
    told = {name: value for name, value in fields.items() if value is not None and value != LOOKUPS.get(name)}
    if told.keys() & LOOKUPS.keys():
        return told
    return ":".join(str(told[name]) for name in ("method", "model", "num_speculative_tokens") if name in told)


def _of_text(text: str) -> object:
    """Return the fields in a short form or in JSON, unchecked; None if JSON cannot be read.

    DuplicateMemberError if JSON has a field twice.
    """
    if text.lstrip().startswith("{"):
        try:
            return parse_json(text)
        except DuplicateMemberError:
            raise
        except ValueError:
            return None
    method, _, rest = (part.strip() for part in text.partition(":"))
    model, _, count = (part.strip() for part in rest.rpartition(":"))
    if method == "draft" and not _is_number(count):
        # Only the number is missing: what there is belongs to the path.
        model, count = rest, ""
    named: dict[str, object] = {"method": method, "model": model or None}
    return named | ({"num_speculative_tokens": int(count) if _is_number(count) else count} if count else {})


def _check_method(fields: Mapping[str, object], repaired: dict[str, object], problems: list[str]) -> str | None:
    """Return the method, or the one that was probably meant; None if there is no good guess."""
    method = fields.get("method")
    if isinstance(method, str) and method in METHODS:
        return method
    known = ", ".join(METHODS)
    lacks = "it names no method" if method is None else f"{method!r} is no method"
    problems.append(f"{lacks} (these are {known})")
    close = get_close_matches(method.lower(), METHODS, n=1) if isinstance(method, str) else []
    guess = close[0] if close else "draft" if "model" in fields else None
    repaired.pop("method", None)
    if guess is not None:
        repaired["method"] = guess
    return guess


def _check_count(fields: Mapping[str, object], repaired: dict[str, object], problems: list[str], example: str) -> None:
    name = "num_speculative_tokens"
    if name not in fields:
        problems.append(f"it does not say how many tokens are guessed ahead, as {example} does ({name})")
        return
    count = fields[name]
    if is_count(count):
        return
    problems.append(f"{name} {count!r} is not a whole number of at least 1")
    del repaired[name]
    if isinstance(count, int):
        repaired[name] = 1


def _check_model(method: str, fields: Mapping[str, object], repaired: dict[str, object], problems: list[str]) -> None:
    model = fields.get("model")
    if method != "draft":
        if model is not None:
            also = ", also for an assistant" if method == "mtp" else ""
            problems.append(f"{method} takes no model, which is for method draft{also}")
            repaired.pop("model", None)
        return
    if isinstance(model, os.PathLike):
        model = repaired["model"] = os.fspath(model)
    if model is None:
        problems.append("method draft needs a model, a smaller checkpoint of the same vocabulary")
    elif not isinstance(model, str) or not model:
        problems.append(f"model {model!r} is no directory and no hub id")
        del repaired["model"]


def _check_lookups(method: str, fields: Mapping[str, Any], repaired: dict[str, Any], problems: list[str]) -> None:
    if method != "ngram":
        others = [name for name in LOOKUPS if name in fields]
        if others:
            problems.append(f"{' and '.join(others)} {_are(others)} for method ngram")
        for name in others:
            del repaired[name]
        return
    lengths = LOOKUPS | {name: fields[name] for name in LOOKUPS if name in fields}
    wrong = [name for name, length in lengths.items() if not is_count(length)]
    for name in wrong:
        problems.append(f"{name} {lengths[name]!r} is not a whole number of at least 1")
    if wrong:
        repaired |= dict.fromkeys(wrong, 1) | {"prompt_lookup_min": 1}
        return
    low, high = lengths["prompt_lookup_min"], lengths["prompt_lookup_max"]
    if low > high:
        is_given = "prompt_lookup_max" in fields
        default = "" if is_given else ", its default"
        problems.append(f"prompt_lookup_min {low} is more than prompt_lookup_max {high}{default}")
        repaired |= {"prompt_lookup_min": high} if is_given else {"prompt_lookup_max": low}


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _is_complete(fields: Mapping[str, object]) -> bool:
    needed = {"method", "num_speculative_tokens"} | ({"model"} if fields.get("method") == "draft" else set())
    return needed <= fields.keys()
