"""Text that comes in pieces. Generators read it from the front, and pause if they need more of it.

They decide only what no further text can change, so it does not matter where the pieces were cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

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

    __slots__ = ("_ended", "position", "released", "text")

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.released = 0
        """Characters that were released so far."""
        self._ended = False

    def add(self, piece: str) -> None:
        self.text += piece

    def end(self) -> None:
        """Declare that no text follows."""
        self._ended = True

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

    Any characters of `previous_hidden` in front of that part belong to it. `text` does not hold the whole tag.
    """
    length = min(len(tag) - 1, len(text))
    while length and not text.endswith(tag[:length]):
        length -= 1
    return len(text[: len(text) - length].rstrip(before))
