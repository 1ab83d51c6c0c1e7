"""Unknown fields of requests: the error with the equivalent here, and reading a body without them.

`unknown_fields` is the setting: they are an error, or are left out, with a header and a log line or in silence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from ostinato.other_engines import FIELD_EQUIVALENTS
from ostinato.serve.http.api_errors import ApiError

UNKNOWN = "unknown_parameter"
"""Code of the errors."""
HEADER = "x-ignored-fields"
MAX_IGNORED = 20
"""Unknown names that a request may have where they are left out: it is read again after each."""
MAX_ON_LOOP = 5
"""Most unknown fields that the event loop removes from a request: each costs it some milliseconds."""
_MAX_LISTED = 12
"""Known names that an error lists."""


def field_advice(name: str, known: Collection[str]) -> str:
    """Return what to give in place of an unknown field; `known` are the fields at its place."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    near = get_close_matches(name, known, 3, 0.7)
    if name not in FIELD_EQUIVALENTS:
        renamed = [field for field, there in FIELD_EQUIVALENTS.items() if isinstance(there, tuple)]
        near = get_close_matches(name, FIELD_EQUIVALENTS, 1, 0.85) + get_close_matches(name, [*known, *renamed], 3, 0.7)
    for candidate in (name, *near):
        there = FIELD_EQUIVALENTS.get(candidate, ())
        if candidate in known:
            return f"did you mean {candidate}?"
        if isinstance(there, str):
            return f"here that is {there}"
        equivalent = next((field for field in there if re.split("[.,]", field)[0] in known), None)
        if equivalent is not None:
            return f"here it is {equivalent}"
    return f"known are {', '.join(known)}" if len(known) <= _MAX_LISTED else "/openapi.json has all that are known"


def unknown_field(place: str, name: str, known: Collection[str]) -> ApiError:
    """Return the error for an unknown field of the object at `place` in the body, which may have the `known` ones."""
    path = f"{place}.{name}" if place else name
    advice = field_advice(name[:100], known)
    return ApiError(400, f"unknown parameter: {path[:500]}; {advice}", param=path, code=UNKNOWN)


def check_members(value: Iterable[str], known: Collection[str], place: str) -> None:
    """Raise the error for an unknown member of an object at `place`."""
    for name in value:
        if name not in known:
            raise unknown_field(place, name, known)


def remove_field(body: object, path: str) -> str | None:
    """Remove the field at `path` from a body, from all items of the lists on the way; return its name if it was there.

    The name is the path without numbers of items, in printable ASCII.
    """
    pattern = re.sub(r"\[\d+\]", "[]", path)
    return pattern.encode("unicode_escape").decode() if _remove(body, pattern, "") else None


def _remove(value: object, pattern: str, place: str) -> bool:
    if isinstance(value, list):
        return sum([_remove(item, pattern, f"{place}[]") for item in value]) > 0
    if not isinstance(value, dict):
        return False
    paths = {name: f"{place}.{name}" if place else name for name in value}
    matches = [name for name, path in paths.items() if re.sub(r"\[\d+\]", "[]", path) == pattern]
    for name in matches:
        del value[name]
    inside = [_remove(each, pattern, paths[name]) for name, each in value.items() if pattern.startswith(paths[name])]
    return bool(matches or any(inside))
