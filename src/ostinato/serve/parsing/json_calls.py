"""Tool calls as JSON objects: one a block (Hermes, Qwen) or a list of them (Nemotron-H, Nemotron Nano 2)."""

from __future__ import annotations

import re
from collections.abc import Collection

from ostinato.serve.parsing.calls import NotACall, read_end
from ostinato.serve.parsing.deltas import DeltaCollector
from ostinato.serve.parsing.formats import ToolFormat
from ostinato.serve.parsing.json_scan import JsonScan, NotJson, load_json, members
from ostinato.serve.parsing.reader import GrowingText, Reading

# The beginning of a call whose arguments can be given out while they come.
_HEADER = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class JsonCalls:
    """Reads calls `{"name": ..., "arguments": {...}}`.

    With the members in this order, arguments are given out as they come. In any other order, and with arguments
    that are a JSON string of an object (which is unwrapped), a call is given out in one piece at its end.
    Further members of a call are ignored, and a brace missing at its end is forgiven.
    """

    def __init__(
        self, text: GrowingText, collector: DeltaCollector, names: Collection[str], tool_format: ToolFormat
    ) -> None:
        self._text = text
        self._collector = collector
        self._names = names
        self._format = tool_format

    def read(self) -> Reading[None]:
        """Read one block, as CallReader says."""
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
        """Give out the object that comes next, and drop the rest of the one around it."""
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
