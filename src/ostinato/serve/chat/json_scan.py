"""Search for the end of a JSON object while its text grows; and the members of a complete object, as text."""

from __future__ import annotations

import json
import re
from typing import Any

# Outside strings, only brackets and strings change the state, and "<" is the beginning of a tag.
_OUTSIDE = re.compile(r'[^"{}\[\]<]*')
_INSIDE = re.compile(r'[^"\\]*')
_SPACE = re.compile(r"[ \t\r\n]*")
_CLOSERS = {"{": "}", "[": "]"}
_DECODER = json.JSONDecoder()


class NotJson(ValueError):
    """Raised for a character at `position` that cannot follow in JSON."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class JsonScan:
    """Scanner of the brackets and strings of a JSON text that comes in pieces. Nothing else is checked."""

    def __init__(self, closers: str = "") -> None:
        """Begin a scan; `closers` close the brackets that are open at the beginning, outermost first."""
        self._closers = list(closers)
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int, depth: int) -> int:
        """Scan the next piece, `text` from `start` on, up to the bracket that leaves `depth` brackets open.

        Returns the position after that bracket, or -1 if it has not come. NotJson at a "<" outside a string, or at a
        bracket that closes none.
        """
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            run = (_INSIDE if self._in_string else _OUTSIDE).match(text, position)
            assert run is not None
            position = run.end()
            if position == len(text):
                break
            character = text[position]
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = True
            elif character in _CLOSERS:
                self._closers.append(_CLOSERS[character])
            elif self._closers and character == self._closers[-1]:
                self._closers.pop()
                if len(self._closers) == depth:
                    return position + 1
            else:
                raise NotJson(position)
            position += 1
        return -1


def load_json(text: str) -> Any:
    """Return the value of a JSON text.

    ValueError if it is no JSON: also for NaN and for text that is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, each value as its text. Of two with one name, the first.

    ValueError if the text is no JSON object.
    """
    if not isinstance(load_json(text), dict):
        raise ValueError("not an object")
    found: dict[str, str] = {}
    position = _skip_space(text, text.index("{") + 1)
    while text[position] != "}":
        name, position = _DECODER.raw_decode(text, position)
        start = _skip_space(text, _skip_space(text, position) + 1)
        _, position = _DECODER.raw_decode(text, start)
        found.setdefault(name, text[start:position])
        position = _skip_space(text, position)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return found


def _skip_space(text: str, position: int) -> int:
    run = _SPACE.match(text, position)
    assert run is not None
    return run.end()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
