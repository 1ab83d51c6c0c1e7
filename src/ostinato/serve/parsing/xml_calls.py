"""Tool calls as tags, a parameter each (Qwen3-Coder, Nemotron 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ostinato.serve.parsing.calls import NotACall, read_end
from ostinato.serve.parsing.deltas import DeltaCollector
from ostinato.serve.parsing.formats import ToolFormat
from ostinato.serve.parsing.reader import GrowingText, Reading
from ostinato.serve.parsing.tools import Tool
from ostinato.serve.parsing.xml_values import argument_json

_NAME = re.compile(r"[^<>\r\n]*")


class XmlCalls:
    """Reads calls `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`.

    A parameter is given out when it is complete, the first with the call's name. One newline on either side of a
    value belongs to the format. A value ends at the first `</parameter>`, whatever it is part of.
    """

    def __init__(self, text: GrowingText, collector: DeltaCollector, tools: Mapping[str, Tool]) -> None:
        self._text = text
        self._collector = collector
        self._tools = tools

    def read(self) -> Reading[None]:
        """Read one block, as CallReader says."""
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
        """What stands before the next ">"; both are read."""
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
