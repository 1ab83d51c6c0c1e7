"""Reader of one answer's text in gpt-oss's form (harmony) while it grows.

The text is messages, each with a header that describes it. A header is `<|start|>assistant`, which the prompt holds of
the first message, perhaps ` to=RECIPIENT`, then `<|channel|>CHANNEL`, perhaps ` to=RECIPIENT` here, perhaps
`<|constrain|>json`, and `<|message|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from ostinato.serve.chat.answer_formats import DeltaCollector
from ostinato.serve.chat.incremental_text import EndOfText, Reading, TextBuffer, start_of_tag
from ostinato.serve.chat.tool_calls.formats import END, MESSAGE, START
from ostinato.serve.chat.tool_calls.readers import ToolCallSyntaxError, read_object

_ENDS = (END, "<|call|>", "<|return|>")
_NEXT = f"{START}assistant"
"""Mark that begins a message, also if the one before has not ended."""
_BEGINS = (_NEXT, "<|channel|>", " to=")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=(?P<before>[^\s<]+))? ?"
    r"<\|channel\|>(?P<channel>\w+)(?: to=(?P<to>[^\s<]+))?(?: ?<\|constrain\|>\w+| \w+)? ?"
)
_MAX_HEADER = 256
_FUNCTIONS = "functions."


class ChannelReader:
    """Reader of the messages of one answer.

    - The channel `analysis` is reasoning. A message of JSON to a function among `names` is a call. All other messages
      are content.
    - A message to any other recipient is content with its header, verbatim, as is text that only looks like a
      message. So is an answer whose special tokens were left out.
    - A newline separates two messages that are both content, or both reasoning.
    - A header that the end of the answer cuts off is dropped.
    """

    def __init__(self, text: TextBuffer, collector: DeltaCollector, names: Collection[str]) -> None:
        self._text, self._collector, self._names = text, collector, names
        self._in_header = False
        self._has_reasoning = self._has_content = False

    def read(self) -> Reading[None]:
        """Read the whole answer. Never raises."""
        try:
            while True:
                yield from self._read_message()
        except EndOfText:
            rest = self._text.release_all()
            if not (self._in_header and rest.startswith(("<|", " to="))):
                self._content(rest)

    def _read_message(self) -> Reading[None]:
        text = self._text
        self._in_header = True
        header = yield from self._header()
        self._in_header = header is not None
        if header is None:
            # Text that only begins like the next message must not end this one before it has begun.
            yield from self._read_body(self._content, least=1 if text.text.startswith(START) else 0)
            return
        recipient = header["to"] or header["before"]
        if recipient is None:
            text.consume(header.end() + len(MESSAGE))
            self._in_header = False
            if header["channel"] == "analysis":
                self._has_reasoning = self._separate(self._has_reasoning, self._collector.add_reasoning)
                yield from self._read_body(self._collector.add_reasoning)
            else:
                self._has_content = self._separate(self._has_content, self._collector.separate_content)
                yield from self._read_body(self._content)
            return
        name = recipient.removeprefix(_FUNCTIONS)
        text.position = header.end() + len(MESSAGE)
        if name in self._names and recipient.startswith(_FUNCTIONS) and (yield from text.next_character()) == "{":
            self._in_header = False
            yield from self._read_call(name)
        else:
            self._in_header = False
            yield from self._read_body(self._content, least=text.position, keeps_end=True)

    def _header(self) -> Reading[re.Match[str] | None]:
        """Return the header that comes next, or None if something else does, without reading anything."""
        text = self._text
        while True:
            if not any(text.text.startswith(begin[: len(text.text)]) for begin in _BEGINS):
                return None
            where = text.text.find(MESSAGE, 0, _MAX_HEADER + len(MESSAGE))
            if where >= 0:
                return _HEADER.fullmatch(text.text, 0, where)
            if len(text.text) >= _MAX_HEADER + len(MESSAGE):
                return None
            yield from text.wait()

    def _separate(self, follows: bool, give: Callable[[str], None]) -> bool:
        if follows:
            give("\n")
        return True

    def _read_call(self, name: str) -> Reading[None]:
        try:
            yield from read_object(self._text, self._collector, name)
        except ToolCallSyntaxError:
            yield from self._read_body(self._content, least=self._text.position, keeps_end=True)
            return
        yield from self._text.drop(" \t\r\n")
        yield from self._read_body(self._content)

    def _read_body(self, give: Callable[[str], None], least: int = 0, *, keeps_end: bool = False) -> Reading[None]:
        """Pass the text up to the message's end on to `give`; the end is dropped unless `keeps_end`.

        The first `least` characters are passed on in any case.
        """
        text = self._text
        give(text.consume(least))
        while True:
            found = [(where, tag) for tag in (*_ENDS, _NEXT) if (where := text.text.find(tag)) >= 0]
            if found:
                where, tag = min(found)
                give(text.consume(where + len(tag) if keeps_end and tag != _NEXT else where))
                if tag != _NEXT and not keeps_end:
                    text.consume(len(tag))
                return
            give(text.consume(min(start_of_tag(text.text, tag, "") for tag in (*_ENDS, _NEXT))))
            yield from text.wait()

    def _content(self, released: str) -> None:
        """Add the text that was released last."""
        self._has_content = self._has_content or bool(released)
        self._collector.add_content(released, self._text.released)
