"""Readers of tool calls whose arguments are JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from ostinato.serve.chat.calls.forms import ARGUMENTS, NAME, JsonSyntax, NamedSyntax, VariablePart
from ostinato.serve.chat.calls.not_a_call import ToolCallSyntaxError, read_end
from ostinato.serve.chat.deltas import DeltaCollector
from ostinato.serve.chat.growing_text import TextBuffer, Reading
from ostinato.serve.chat.json_scan import JsonScan, NotJson, load_json, members


class JsonCalls:
    """Reader of calls `{"name": ..., "arguments": {...}}`.

    With the members in this order, arguments are passed on as they come. In another order a call is passed on as a
    whole at its end; so are arguments that are a JSON string of an object, which is unwrapped. Further members of a
    call are ignored, and a missing brace at its end is forgiven.
    """

    def __init__(
        self, text: TextBuffer, collector: DeltaCollector, names: Collection[str], syntax: JsonSyntax
    ) -> None:
        self._text = text
        self._collector = collector
        self._names = names
        self._syntax = syntax
        self._header = _header(syntax)

    def read_call(self) -> Reading[None]:
        """Read a call; see `CallReader`."""
        text = self._text
        if (yield from text.next_character()) != "{":
            raise ToolCallSyntaxError
        start = scanned = text.position
        scan = JsonScan()
        while (header := self._header.match(text.text, start)) is None:
            try:
                end = scan.scan(text.text, scanned, depth=0)
            except NotJson as error:
                text.position = error.position
                raise ToolCallSyntaxError from None
            if end >= 0:
                text.position = end
                self._give_whole(text.text[start:end])
                return
            scanned = len(text.text)
            yield from text.wait()
        text.position = header.end()
        self._begin(header[1])
        yield from stream_object(text, self._collector, within="}")
        yield from self._drop_rest()

    def _begin(self, name: str) -> None:
        if name not in self._names:
            raise ToolCallSyntaxError
        self._collector.begin_call(name)
        self._text.consume()

    def _give_whole(self, call: str) -> None:
        try:
            name, written = self._parts(members(call))
            arguments = load_json(written)
            if isinstance(arguments, str):
                written, arguments = arguments, load_json(arguments)
        except (KeyError, ValueError):
            raise ToolCallSyntaxError from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ToolCallSyntaxError
        self._begin(name)
        self._collector.add_arguments(written)

    def _parts(self, found: dict[str, str]) -> tuple[object, str]:
        """Return name and arguments, as they are written, of a call with these members."""
        if self._syntax.name is None:
            [(name, arguments)] = found.items()
            return name, arguments
        return load_json(found[self._syntax.name]), found[self._syntax.arguments]

    def _drop_rest(self) -> Reading[None]:
        """Drop the text after the arguments in the object around them."""
        text, scan = self._text, JsonScan("}")
        while True:
            try:
                end = scan.scan(text.text, 0, depth=0)
            except NotJson as error:
                text.consume(error.position)
                return
            if end >= 0:
                text.consume(end)
                return
            text.release_all()
            yield from text.wait()


class NamedCalls:
    """Reader of calls that are a name and an object of arguments, which are passed on as they come."""

    def __init__(
        self, text: TextBuffer, collector: DeltaCollector, names: Collection[str], syntax: NamedSyntax
    ) -> None:
        self._text = text
        self._collector = collector
        self._names = names
        place = syntax.parts.index(ARGUMENTS)
        self._before = [part for part in syntax.parts[:place] if not (isinstance(part, str) and part.isspace())]
        self._after = [part for part in syntax.parts[place + 1 :] if isinstance(part, str) and not part.isspace()]

    def read_call(self) -> Reading[None]:
        """Read a call; see `CallReader`."""
        text, name = self._text, ""
        for part in self._before:
            if isinstance(part, str):
                if not (yield from text.tag(part)):
                    raise ToolCallSyntaxError
            elif part is NAME:
                name = yield from self._run(part)
            else:
                yield from self._run(part)
        if (yield from text.next_character()) != "{" or name not in self._names:
            raise ToolCallSyntaxError
        self._collector.begin_call(name)
        text.consume()
        yield from stream_object(text, self._collector)
        yield from read_end(text, *self._after)

    def _run(self, slot: VariablePart) -> Reading[str]:
        """Return the longest text that fits a slot. Text after it must have come, to show where it ends."""
        text = self._text
        yield from text.next_character()
        while True:
            found = re.compile(slot.value).match(text.text, text.position)
            if found is not None and found.end() < len(text.text):
                text.position = found.end()
                return found[0]
            if found is None and len(text.text) - text.position >= _MAX_RUN:
                raise ToolCallSyntaxError
            if found is None and not re.fullmatch("[a-zA-Z0-9_-]*", text.text[text.position :]):
                raise ToolCallSyntaxError
            yield from text.wait()


_MAX_RUN = 64


def stream_object(text: TextBuffer, collector: DeltaCollector, within: str = "") -> Reading[None]:
    """Pass the object that comes next on as arguments.

    `within` closes the brackets around the object. NotACall at a character that is not allowed in it; the text before
    that character has been passed on by then.
    """
    scan = JsonScan(within)
    while True:
        try:
            end = scan.scan(text.text, 0, depth=len(within))
        except NotJson as error:
            collector.add_arguments(text.consume(error.position))
            raise ToolCallSyntaxError from None
        if end >= 0:
            collector.add_arguments(text.consume(end))
            return
        collector.add_arguments(text.release_all())
        yield from text.wait()


def _header(syntax: JsonSyntax) -> re.Pattern[str]:
    """Return a pattern for the beginning of a call whose arguments can be passed on while they come."""
    if syntax.name is None:
        return re.compile(r'\{\s*"([^"\\]*)"\s*:\s*(?=\{)')
    name, arguments = json.dumps(syntax.name), json.dumps(syntax.arguments)
    return re.compile(rf'\{{\s*{name}\s*:\s*"([^"\\]*)"\s*,\s*{arguments}\s*:\s*(?=\{{)')
