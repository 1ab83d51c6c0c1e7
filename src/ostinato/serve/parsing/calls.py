"""What the readers of all tool-call formats have in common."""

from __future__ import annotations

from typing import Protocol

from ostinato.serve.parsing.reader import EndOfText, GrowingText, Reading


class NotACall(Exception):
    """The text left the format of tool calls at its position; what is read and not released is content."""


class CallReader(Protocol):
    """Reads the calls of one format out of a growing text and gives them to a DeltaCollector."""

    def read(self) -> Reading[None]:
        """Read one block of calls, from after its begin tag to after its end tag, and release it.

        NotACall where the text leaves the format.
        """


def read_end(text: GrowingText, *tags: str) -> Reading[None]:
    """Read the tags that end a block whose last call is complete; half of them is no text of its own."""
    try:
        for tag in tags:
            if not (yield from text.tag(tag)):
                raise NotACall
    except EndOfText:
        text.release_all()
        raise
    text.release()
