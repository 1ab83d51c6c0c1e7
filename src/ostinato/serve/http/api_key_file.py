"""Clients' keys in settings and a file: each with a name, and a weight for its fair share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ostinato.errors import ConfigError, os_error_text
from ostinato.files import read_text

MAX_KEYS = 10_000
"""Largest number of keys in an api_key_file: each has series in the metrics, and all are compared in each request."""
MAX_WEIGHT = 1000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WEIGHT = "weight="
_SEES_ALL = "metrics=all"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and its weight: its client's turns for one turn of others."""

    key: str = field(repr=False)
    weight: int = 1
    sees_all: bool = False
    """True if `/metrics` shows the key's client all keys, not only this one."""


def read_keys(given: Sequence[str], path: Path | None) -> dict[str, ApiKey]:
    """Return keys by name, from the settings and the file. ConfigError if the file is broken."""
    try:
        return named_keys(given, path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def named_keys(given: Sequence[str], path: Path | None) -> dict[str, ApiKey]:
    """Return keys by name, as `read_keys` does; ValueError if the file is broken. No message holds a key."""
    keys = {f"api_key-{place}": ApiKey(key) for place, key in enumerate(given, start=1)}
    if path is None:
        return keys
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file {path} cannot be read: {os_error_text(error)}") from None
    known = set(given)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            name, key = _read_line(line.split(), f"line-{number}")
            if name in keys or key.key in known:
                raise ValueError("its name or its key stands there twice")
        except ValueError as error:
            raise ValueError(f"api_key_file {path}, line {number}: {error}") from None
        keys[name] = key
        known.add(key.key)
    if len(keys) == len(given):
        raise ValueError(f"api_key_file {path} holds no key; write one a line")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"api_key_file {path} holds {len(keys)} keys, and may hold {MAX_KEYS}")
    return keys


def _read_line(words: list[str], name: str) -> tuple[str, ApiKey]:
    """Return the key of a line, with its name; `name` if it has none."""
    weight, sees_all = 1, False
    while len(words) > 1:
        if words[-1].startswith(_WEIGHT):
            weight = _weight(words.pop().removeprefix(_WEIGHT))
        elif words[-1] == _SEES_ALL:
            words.pop()
            sees_all = True
        else:
            break
    match words:
        case [key]:
            pass
        case [name, key]:
            pass
        case _:
            options = f"a weight ({_WEIGHT}2) or {_SEES_ALL}"
            raise ValueError(f"it should be a key, or a name and a key, and perhaps {options} behind them")
    if not _NAME.fullmatch(name):
        raise ValueError("a name is 1 to 64 letters, digits, _, . or -")
    if not key.isascii():
        raise ValueError("a key is ASCII text")
    return name, ApiKey(key, weight, sees_all)


def _weight(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= MAX_WEIGHT):
        raise ValueError(
            f"a weight is a whole number from 1 to {MAX_WEIGHT}, such as {_WEIGHT}1 (as without one) or {_WEIGHT}4"
        )
    return int(text)
