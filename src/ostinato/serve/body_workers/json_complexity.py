"""Shape of a JSON body, counted over its bytes before anything is built from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.settings import ServeSettings

MAX_DEPTH = 200
"""Largest depth of nested lists and objects."""
LIGHT_BYTES = 2**14
"""Largest body that may be read on the event loop, in bytes; that takes some milliseconds."""
LIGHT_VALUES = 1024
"""Largest number of values of such a body."""
_PIECE = 2**20
"""Bytes that are counted together; that takes a dozen times as much memory."""


@dataclass(frozen=True)
class JsonComplexity:
    """Shape of a body that is JSON. For other bodies the numbers mean nothing."""

    depth: int
    keys: int
    """Members of objects."""
    values: int
    """Upper bound of the number of values: each empty list or object counts as one more."""


def fits_event_loop(body: bytes) -> bool:
    """Return whether a body is small enough to parse on the event loop."""
    return len(body) <= LIGHT_BYTES and _max_values(body) <= LIGHT_VALUES


def check_small_body(body: bytes, settings: ServeSettings) -> None:
    """Check a light body as `check_shape` does, which usually needs no full count."""
    if _max_values(body) > min(MAX_DEPTH, settings.max_keys, settings.max_values):
        check_shape(body, settings)


def _max_values(body: bytes) -> int:
    """Return an upper bound of a body's number of values and of its depth; it counts strings' contents too."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") + 1


def check_shape(body: bytes, settings: ServeSettings) -> None:
    """Raise ApiError for a body that is nested too deep, or has more keys or values than a request may have."""
    shape = shape_of(body)
    if shape.depth > MAX_DEPTH:
        message = f"the body is nested {shape.depth} deep, and may be {MAX_DEPTH} deep"
        raise ApiError(400, message, code="nested_too_deep")
    for name, count in (("keys", shape.keys), ("values", shape.values)):
        most = getattr(settings, f"max_{name}")
        if count > most:
            message = f"the body has {count} {name}, and may have {most} (max_{name})"
            raise ApiError(400, message, code="body_too_complex")


def shape_of(body: bytes) -> JsonComplexity:
    """Count depth, keys and values outside of strings; stop early if the body is nested too deep."""
    # Without escapes, every quote begins or ends a string. Backslashes occur only in strings.
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
    return JsonComplexity(deepest, colons, commas + openings + 1)
