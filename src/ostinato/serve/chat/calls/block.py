"""Reader of a block of tool calls in an answer's text while it grows, whatever the form of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ostinato.serve.chat.calls.forms import JsonSyntax, NamedSyntax, TagSyntax, ToolCallFormat
from ostinato.serve.chat.calls.json_calls import JsonCalls, NamedCalls
from ostinato.serve.chat.calls.not_a_call import ToolCallSyntaxError, read_end
from ostinato.serve.chat.calls.python_calls import PythonCalls
from ostinato.serve.chat.calls.tag_calls import TagCalls
from ostinato.serve.chat.deltas import DeltaCollector
from ostinato.serve.chat.growing_text import TextBuffer, Reading
from ostinato.serve.chat.tools import Tool


class CallReader(Protocol):
    """Reader of one call of a syntax in a growing text; it passes the call to a DeltaCollector."""

    def read_call(self) -> Reading[None]:
        """Read a call, and release it once it is recognised. NotACall if the text does not follow the syntax."""


class BlockReader:
    """Reader of the blocks of one form."""

    def __init__(self, form: ToolCallFormat, text: TextBuffer, collector: DeltaCollector, tools: Mapping[str, Tool]) -> None:
        self._form = form
        self._text = text
        self._call = _call_reader(form, text, collector, tools)

    def read(self) -> Reading[None]:
        """Read one block, from after its begin tag to after its end tag, and release it.

        NotACall if the text does not follow the form.
        """
        form, text = self._form, self._text
        if form.open and not (yield from text.tag(form.open)):
            raise ToolCallSyntaxError
        yield from self._call.read_call()
        while form.separator is not None and (yield from self._goes_on(form.separator)):
            yield from self._call.read_call()
        yield from read_end(text, *(tag for tag in (form.close, form.end) if tag))

    def _goes_on(self, separator: str) -> Reading[bool]:
        """Read the separator, and return whether another call follows."""
        if separator:
            return (yield from self._text.tag(separator))
        before = self._text.position
        ends = yield from self._text.tag(self._form.end)
        self._text.position = before
        return not ends


def _call_reader(form: ToolCallFormat, text: TextBuffer, collector: DeltaCollector, tools: Mapping[str, Tool]) -> CallReader:
    match form.syntax:
        case JsonSyntax() as syntax:
            return JsonCalls(text, collector, tools.keys(), syntax)
        case NamedSyntax() as syntax:
            return NamedCalls(text, collector, tools.keys(), syntax)
        case TagSyntax() as syntax:
            return TagCalls(text, collector, tools, syntax)
        case _:
            return PythonCalls(text, collector, tools.keys())
