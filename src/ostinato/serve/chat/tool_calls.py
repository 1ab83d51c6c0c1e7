"""Reads tool calls out of an answer's text while it grows, in each format that models write them in."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Protocol

from ostinato.serve.chat.deltas import DeltaCollector
from ostinato.serve.chat.formats import ToolFormat
from ostinato.serve.chat.growing_text import EndOfText, GrowingText, Reading
from ostinato.serve.chat.json_scan import JsonScan, NotJson, load_json, members
from ostinato.serve.chat.schemas import argument_json
from ostinato.serve.chat.tools import Tool


class NotACall(Exception):
    """The text left the format of tool calls at its position. Text that is read but not released is content."""


class CallReader(Protocol):
    """Reads the calls of one format from a growing text, and gives them to a DeltaCollector."""

    def read(self) -> Reading[None]:
        """Reads one block of calls, from after its begin tag to after its end tag, and releases it. NotACall where the
        text leaves the format."""


def read_end(text: GrowingText, *tags: str) -> Reading[None]:
    """Reads the tags that end a block whose last call is complete. If the answer ends within them, they are dropped."""
    try:
        for tag in tags:
            if not (yield from text.tag(tag)):
                raise NotACall
    except EndOfText:
        text.release_all()
        raise
    text.release()


# The beginning of a call whose arguments can be given out while they come.
_HEADER = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class JsonCalls:
    """Reads calls `{"name": ..., "arguments": {...}}`.

    With the members in this order, arguments are given out as they come. In another order a call is given out at once
    at its end; so are arguments that are a JSON string of an object, which is unwrapped. Further members of a call are
    ignored, and a missing brace at its end is forgiven.
    """

    def __init__(
        self, text: GrowingText, collector: DeltaCollector, names: Collection[str], tool_format: ToolFormat
    ) -> None:
        self._text = text
        self._collector = collector
        self._names = names
        self._format = tool_format

    def read(self) -> Reading[None]:
        """See CallReader."""
        if self._format is ToolFormat.HERMES:
            yield from self._read_call()
            yield from read_end(self._text, self._format.end_tag)
            return
        if not (yield from self._text.tag("[")):
            raise NotACall
        yield from self._read_call()
        while (yield from self._text.tag(",")):
            yield from self._read_call()
        yield from read_end(self._text, "]", self._format.end_tag)

    def _read_call(self) -> Reading[None]:
        text = self._text
        if (yield from text.next_character()) != "{":
            raise NotACall
        start = scanned = text.position
        scan = JsonScan()
        while (header := _HEADER.match(text.text, start)) is None:
            try:
                end = scan.scan(text.text, scanned, depth=0)
            except NotJson as error:
                text.position = error.position
                raise NotACall from None
            if end >= 0:
                text.position = end
                self._give_whole(text.text[start:end])
                return
            scanned = len(text.text)
            yield from text.wait()
        text.position = header.end()
        self._begin(header[1])
        yield from self._stream_arguments()

    def _begin(self, name: str) -> None:
        if name not in self._names:
            raise NotACall
        self._collector.begin_call(name)
        self._text.release()

    def _give_whole(self, call: str) -> None:
        try:
            found = members(call)
            name, arguments = load_json(found["name"]), load_json(found["arguments"])
            if isinstance(arguments, str):
                unwrapped, arguments = arguments, load_json(arguments)
            else:
                unwrapped = found["arguments"]
        except (KeyError, ValueError):
            raise NotACall from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NotACall
        self._begin(name)
        self._collector.add_arguments(unwrapped)

    def _stream_arguments(self) -> Reading[None]:
        """Gives out the object that comes next, and drops the rest of the object around it."""
        text, give = self._text, self._collector.add_arguments
        scan = JsonScan("}")
        while True:
            try:
                end = scan.scan(text.text, 0, depth=1)
            except NotJson as error:
                give(text.release(error.position))
                raise NotACall from None
            if end >= 0:
                give(text.release(end))
                break
            give(text.release_all())
            yield from text.wait()
        while True:
            try:
                end = scan.scan(text.text, 0, depth=0)
            except NotJson as error:
                text.release(error.position)
                return
            if end >= 0:
                text.release(end)
                return
            text.release_all()
            yield from text.wait()


_NAME = re.compile(r"[^<>\r\n]*")


class XmlCalls:
    """Reads calls `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`.

    Each parameter is given out when it is complete, the first one with the call's name. One newline on either side of a
    value belongs to the format. A value ends at the first `</parameter>`, even inside other text.
    """

    def __init__(self, text: GrowingText, collector: DeltaCollector, tools: Mapping[str, Tool]) -> None:
        self._text = text
        self._collector = collector
        self._tools = tools

    def read(self) -> Reading[None]:
        """See CallReader."""
        text, give = self._text, self._collector.add_arguments
        if not (yield from text.tag("<function=")):
            raise NotACall
        name = yield from self._read_name()
        tool = self._tools.get(name)
        if tool is None:
            raise NotACall
        keys: set[str] = set()
        while (yield from text.tag("<parameter=")):
            key = yield from self._read_name()
            if not key or key in keys:
                raise NotACall
            value = _without_newlines((yield from text.until("</parameter>")))
            if not keys:
                self._collector.begin_call(name)
            give("{" if not keys else ", ")
            give(f"{json.dumps(key, ensure_ascii=False)}: {argument_json(value, tool.parameters, key)}")
            keys.add(key)
            text.release()
        if not (yield from text.tag("</function>")):
            raise NotACall
        if not keys:
            self._collector.begin_call(name)
        give("}" if keys else "{}")
        text.release()
        yield from read_end(text, ToolFormat.XML.end_tag)

    def _read_name(self) -> Reading[str]:
        """The text before the next ">". Both are read."""
        text, start = self._text, self._text.position
        while True:
            run = _NAME.match(text.text, text.position)
            assert run is not None
            text.position = run.end()
            if text.position < len(text.text):
                if text.text[text.position] != ">":
                    raise NotACall
                text.position += 1
                return text.text[start : text.position - 1]
            yield from text.wait()


def _without_newlines(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")
