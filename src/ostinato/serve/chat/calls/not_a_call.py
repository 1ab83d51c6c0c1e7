"""Common parts of all readers of calls: the error for a text that is no call, and the end of a call."""

from __future__ import annotations

from ostinato.serve.chat.growing_text import EndOfText, TextBuffer, Reading


class ToolCallSyntaxError(Exception):
    """Raised if the text does not follow the form at its position. Text that is read but not released is content."""


def read_end(text: TextBuffer, *tags: str) -> Reading[None]:
    """Read the tags that end a complete call. If the answer ends within them, they are dropped."""
    try:
        for tag in tags:
            if not (yield from text.tag(tag)):
                raise ToolCallSyntaxError
    except EndOfText:
        text.release_all()
        raise
    text.consume()
