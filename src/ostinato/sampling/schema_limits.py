"""Limits of a JSON schema within which llguidance is known to be safe, quick and exact. Imports no grammar library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_NUMBER = 2**53 - 1
"""Greatest magnitude of a number: the library keeps numbers in 64 bits of floating point, and reads integers near
-2**63 in a way that ends the process."""
MIN_NUMBER = 1e-100
"""Least magnitude of a number that is not 0. The library writes numbers out, digit by digit."""
MAX_COUNT = 2**31 - 1
"""Greatest length of a string, or number of items or properties."""
MAX_JOINED_PATTERNS = 12
"""Patterns of a schema whose parts are joined: one text that matches n patterns takes up to 2**n states."""
MAX_PATTERN_PROPERTIES = 48
"""Patterns of one `patternProperties`: each is compared with each."""
MAX_OPTIONAL_RUN = 480
"""Optional properties between two required ones: a parser keeps four places for each."""
MAX_ALTERNATIVES = 900
"""Entries of `anyOf` and the like, and values of `enum` that are lists or objects: all are parsed at once."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_ANNOTATIONS = {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}
_Place = tuple[Any, ...]


def check_limits(schema: Any) -> None:
    """Raise ValueError with keyword, place and values that work, unless all of a schema is within the limits.

    A number counts wherever it stands, and whatever for: `$ref` can make a schema of any part.
    """
    patterns, joins = 0, ""
    for place, value in _places(schema):
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(place, value)
        elif isinstance(value, dict):
            _check_object(place, value)
            several = value.get("patternProperties")
            patterns += isinstance(value.get("pattern"), str) + (len(several) if isinstance(several, dict) else 0)
            joins = joins or (_path(place) if _joins(value) else "")
    if joins and patterns > MAX_JOINED_PATTERNS:
        raise ValueError(
            f"the schema has {patterns} patterns, and may have {MAX_JOINED_PATTERNS} where parts are joined, as by "
            f"allOf, or by anyOf or $ref beside other keywords, at {joins}"
        )


def _check_number(place: _Place, value: int | float) -> None:
    last = place[-1] if place else None
    if last in _COUNTS:
        if isinstance(value, float) or not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{_path(place)} is {_said(value)}, and may be a whole number from 0 to {MAX_COUNT}")
    elif last == "multipleOf" and value <= 0:
        raise ValueError(f"{_path(place)} is {_said(value)}, and has to be greater than 0")
    if value != 0 and not MIN_NUMBER <= abs(value) <= MAX_NUMBER:
        raise ValueError(
            f"{_path(place)} is {_said(value)}; numbers that can be enforced are 0 and those from {MIN_NUMBER} to "
            f"{MAX_NUMBER}, or from -{MAX_NUMBER} to -{MIN_NUMBER}"
        )


def _check_object(place: _Place, value: dict[str, Any]) -> None:
    for name in _ALTERNATIVES:
        _check_alternatives((*place, name), value.get(name))
    values = value.get("enum")
    if isinstance(values, list):
        _check_alternatives((*place, "enum"), [each for each in values if isinstance(each, list | dict)])
    several = value.get("patternProperties")
    if isinstance(several, dict) and len(several) > MAX_PATTERN_PROPERTIES:
        where = _path((*place, "patternProperties"))
        raise ValueError(f"{where} has {len(several)} patterns, and may have {MAX_PATTERN_PROPERTIES}")
    properties, required = value.get("properties"), value.get("required")
    if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL_RUN:
        needed = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
        run = 0
        for name in properties:
            run = 0 if name in needed else run + 1
            if run > MAX_OPTIONAL_RUN:
                raise ValueError(
                    f"{_path((*place, 'properties'))} has more than {MAX_OPTIONAL_RUN} optional properties in a row; "
                    "it may have more if some between them are required"
                )


def _check_alternatives(place: _Place, values: Any) -> None:
    if isinstance(values, list) and len(values) > MAX_ALTERNATIVES:
        raise ValueError(f"{_path(place)} has {len(values)} alternatives, and may have {MAX_ALTERNATIVES}")


def _joins(value: dict[str, Any]) -> bool:
    """Return whether a text may have to match several parts of a schema at once."""
    every = value.get("allOf")
    if isinstance(every, list) and len(every) > 1:
        return True
    parts = [name for name in ("$ref", *_ALTERNATIVES) if name in value]
    return bool(parts) and len(value.keys() - _ANNOTATIONS) > 1


def _places(schema: Any) -> Iterator[tuple[_Place, Any]]:
    """Yield every value in a schema with the keys that lead to it."""
    waiting: list[tuple[_Place, Any]] = [((), schema)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting.extend(((*place, key), inner) for key, inner in entries)


def _path(place: _Place) -> str:
    """Return keys as a JSON path, shortened where they are long."""
    steps = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{json.dumps(key)}]" for key in place)
    path = "$" + "".join(steps)
    return path if len(path) <= 200 else f"{path[:60]} ... {path[-120:]}"


def _said(value: int | float) -> str:
    """Return a number as text; of a long one, how many digits it has."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of more than {value.bit_length() * 3 // 10} digits"
    return repr(value)
