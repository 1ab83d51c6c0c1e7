"""Text that comes in pieces. Generators read it from the front, and pause if they need more of it.

They decide only what no further text can change, so it does not matter where the pieces were cut. One of them finds the
end of a JSON object; the members of a complete object are found as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from ostinato.json_io import parse_json

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
"""A reader that pauses for more text, and returns a `_T`."""


class EndOfText(Exception):
    """Raised if more text is needed, and none will come."""


class TextBuffer:
    """Text that has come and is not released yet; its first `position` characters are read.

    Text that is read but not released can still turn out to be plain text, and is then passed on unchanged.
    """

    __slots__ = ("_ended", "is_cut", "position", "released", "text")

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.released = 0
        """Characters that were released so far."""
        self._ended = False
        self.is_cut = False
        """True if the text ended before the model ended it."""

    def add(self, piece: str) -> None:
        self.text += piece

    def end(self, is_cut: bool) -> None:
        """Declare that no text follows; `is_cut`: the model would have written more."""
        self._ended, self.is_cut = True, is_cut

    def consume(self, count: int | None = None) -> str:
        """Remove and return the first `count` characters (default: those read so far). Reading continues after them."""
        count = self.position if count is None else count
        taken, self.text = self.text[:count], self.text[count:]
        self.position = max(0, self.position - count)
        self.released += len(taken)
        return taken

    def release_all(self) -> str:
        return self.consume(len(self.text))

    def wait(self) -> Reading[None]:
        """Pause until there may be more text. EndOfText if there will be none."""
        if self._ended:
            raise EndOfText
        yield

    def drop(self, characters: str) -> Reading[None]:
        """Release those of these characters that come next. Everything that was read must be released."""
        while True:
            left = self.text.lstrip(characters)
            self.released += len(self.text) - len(left)
            self.text = left
            if self.text:
                return
            yield from self.wait()

    def next_character(self) -> Reading[str]:
        """Read white space, and return the character after it."""
        while True:
            self.position = _after_space(self.text, self.position)
            if self.position < len(self.text):
                return self.text[self.position]
            yield from self.wait()

    def tag(self, tag: str) -> Reading[bool]:
        """Return whether `tag` comes next, perhaps after white space. If it does, both are read."""
        start = self.position
        while True:
            start = _after_space(self.text, start)
            if self.text.startswith(tag, start):
                self.position = start + len(tag)
                return True
            if not tag.startswith(self.text[start : start + len(tag)]):
                return False
            yield from self.wait()

    def until(self, tag: str) -> Reading[str]:
        """Return the text before the next `tag`; both are read."""
        start = searched = self.position
        while (where := self.text.find(tag, searched)) < 0:
            searched = max(start, len(self.text) - len(tag) + 1)
            yield from self.wait()
        self.position = where + len(tag)
        return self.text[start:where]


def _after_space(text: str, start: int) -> int:
    run = _SPACES.match(text, start)
    assert run is not None
    return run.end()


def start_of_tag(text: str, tag: str, before: str) -> int:
    """Return the start of the end of `text` that may be the beginning of `tag`, or the length of `text`.

    Any characters of `before` in front of that part belong to it. `text` does not hold the whole tag.
    """
    length = min(len(tag) - 1, len(text))
    while length and not text.endswith(tag[:length]):
        length -= 1
    return len(text[: len(text) - length].rstrip(before))


# Outside strings, only brackets and strings change the state, and "<" is the beginning of a tag.
_OUTSIDE = re.compile(r'[^"{}\[\]<]*')
_INSIDE = re.compile(r'[^"\\]*')
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
    """Return the value of a JSON text. ValueError if it is none, has NaN, or is nested too deep."""
    return parse_json(text, repeats=True, parse_constant=_refuse_constant)


def members(text: str) -> dict[str, str]:
    """Return a JSON object's members as texts, the first of two with a name. ValueError if it is no object."""
    if not isinstance(load_json(text), dict):
        raise ValueError("not an object")
    found: dict[str, str] = {}
    position = _after_space(text, text.index("{") + 1)
    while text[position] != "}":
        name, position = _DECODER.raw_decode(text, position)
        start = _after_space(text, _after_space(text, position) + 1)
        _, position = _DECODER.raw_decode(text, start)
        found.setdefault(name, text[start:position])
        position = _after_space(text, position)
        if text[position] == ",":
            position = _after_space(text, position + 1)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
