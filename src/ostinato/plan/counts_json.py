"""Counts in a file of traffic: objects whose keys are whole numbers as strings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ostinato.errors import ConfigError


def json_object(name: str, data: Any) -> dict[str, Any]:
    """`data` if it is an object, else a ConfigError that names it."""
    if not isinstance(data, dict):
        raise ConfigError(f"{name} = {_short(data)}: it is an object")
    return data


def read_counts(name: str, data: Any) -> Counter[int]:
    """`{number: times}` from an object whose keys are numbers as strings; else a ConfigError that names the entry."""
    counts: Counter[int] = Counter()
    for key, count in json_object(name, data).items():
        number = read_number(name, key)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{name}.{key} = {_short(count)}: it is how often that was counted, a whole number")
        counts[number] = count
    return counts


def read_number(name: str, key: Any) -> int:
    """The number that a key of the object `name` stands for; else a ConfigError."""
    # In one way of writing only, so that no two keys are one number.
    if not isinstance(key, str) or re.fullmatch("[1-9][0-9]{0,17}", key) is None:
        raise ConfigError(f"{name} has the key {_short(key)}: its keys are whole numbers of at least 1")
    return int(key)


def with_string_keys(counts: Mapping[int, int]) -> dict[str, int]:
    """As it stands in a file: keys ascending."""
    return {str(number): count for number, count in sorted(counts.items())}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
