"""What a JSON body holds, counted over its bytes before anything is built from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.serve.http.errors import ApiError
from ostinato.serve.settings import ServeSettings

MAX_DEPTH = 200
"""Lists and objects inside each other."""
LIGHT_BYTES = 2**14
"""A body of at most so many bytes may be read on the event loop, where it takes some milliseconds."""
LIGHT_VALUES = 1024
"""If it has at most so many values."""
_PIECE = 2**20
"""Bytes that are looked at together: what that takes in memory is a dozen times as much."""


@dataclass(frozen=True)
class Shape:
    """Of a body that is JSON. Of another one, these are some numbers."""

    depth: int
    keys: int
    """Members of objects"""
    values: int
    """At most so many: one more for each list or object that is empty"""


def is_light(body: bytes) -> bool:
    """Whether a body takes little to read, as far as that shows at a glance."""
    return len(body) <= LIGHT_BYTES and _most_values(body) <= LIGHT_VALUES


def check_light(body: bytes, settings: ServeSettings) -> None:
    """`check_shape` of a light body, which most often need not be looked at."""
    if _most_values(body) > min(MAX_DEPTH, settings.max_keys, settings.max_values):
        check_shape(body, settings)


def _most_values(body: bytes) -> int:
    """At least as many as it has, and as it is nested deep: what stands in strings counts too."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") + 1


def check_shape(body: bytes, settings: ServeSettings) -> None:
    """ApiError for a body that is nested too deep, or has more keys or values than a request may have."""
    shape = shape_of(body)
    if shape.depth > MAX_DEPTH:
        message = f"the body is nested {shape.depth} deep, and may be {MAX_DEPTH} deep"
        raise ApiError(400, message, code="nested_too_deep")
    for name, count in (("keys", shape.keys), ("values", shape.values)):
        most = getattr(settings, f"max_{name}")
        if count > most:
            message = f"the body has {count} {name}, and may have {most} (max_{name})"
            raise ApiError(400, message, code="body_too_complex")


def shape_of(body: bytes) -> Shape:
    """Counts outside of strings; ends early where the body is nested deeper than it may be."""
    # Without escapes, every quote begins or ends a string. Backslashes stand in strings alone.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    depth = deepest = commas = colons = openings = 0
    inside = False
    for begin in range(0, len(plain), _PIECE):
        piece = np.frombuffer(plain, np.uint8, min(_PIECE, len(plain) - begin), begin)
        in_string = np.logical_xor.accumulate(piece == ord('"')) ^ inside
        inside = bool(in_string[-1])
        outside = piece[~in_string]
        is_open = (outside == ord("[")) | (outside == ord("{"))
        is_close = (outside == ord("]")) | (outside == ord("}"))
        levels = np.cumsum(is_open.view(np.int8) - is_close.view(np.int8), dtype=np.int64)
        if levels.size:
            deepest = max(deepest, depth + int(levels.max()))
            depth += int(levels[-1])
        commas += int(np.count_nonzero(outside == ord(",")))
        colons += int(np.count_nonzero(outside == ord(":")))
        openings += int(np.count_nonzero(is_open))
        if deepest > MAX_DEPTH:
            break
    return Shape(deepest, colons, commas + openings + 1)
