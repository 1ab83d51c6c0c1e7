"""What all readers of calls share: how they say that a text is no call, and how a call ends."""

from __future__ import annotations

from ostinato.serve.chat.growing_text import EndOfText, GrowingText, Reading


class NotACall(Exception):
    """The text left the form of tool calls at its position. Text that is read but not released is content."""


def read_end(text: GrowingText, *tags: str) -> Reading[None]:
    """Reads the tags that end a call that is complete. If the answer ends within them, they are dropped."""
    try:
        for tag in tags:
            if not (yield from text.tag(tag)):
                raise NotACall
    except EndOfText:
        text.release_all()
        raise
    text.release()
