"""Counts in a traffic file: objects whose keys are whole numbers as strings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ostinato.errors import ConfigError


def json_object(name: str, data: Any) -> dict[str, Any]:
    """Return `data` if it is an object, else raise a ConfigError that names it."""
    if not isinstance(data, dict):
        raise ConfigError(f"{name} = {_short(data)}: it is an object")
    return data


def read_counts(name: str, data: Any) -> Counter[int]:
    """Return `{number: times}` from an object whose keys are numbers as strings.

    ConfigError, which names the entry, for anything else.
    """
    counts: Counter[int] = Counter()
    for key, count in json_object(name, data).items():
        number = read_number(name, key)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{name}.{key} = {_short(count)}: it is how often that was counted, a whole number")
        counts[number] = count
    return counts


def read_number(name: str, key: Any) -> int:
    """Return the number that a key of the object `name` represents, or raise a ConfigError."""
    # Only one spelling is accepted, so that no two keys are the same number.
    if not isinstance(key, str) or re.fullmatch("[1-9][0-9]{0,17}", key) is None:
        raise ConfigError(f"{name} has the key {_short(key)}: its keys are whole numbers of at least 1")
    return int(key)


def with_string_keys(counts: Mapping[int, int]) -> dict[str, int]:
    """Return the counts in the form of a file: keys ascending, as strings."""
    return {str(number): count for number, count in sorted(counts.items())}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
