"""Reader of tool calls with tags around each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ostinato.serve.chat.calls.forms import TagSyntax
from ostinato.serve.chat.calls.not_a_call import ToolCallSyntaxError
from ostinato.serve.chat.deltas import DeltaCollector
from ostinato.serve.chat.growing_text import TextBuffer, Reading
from ostinato.serve.chat.schemas import argument_json
from ostinato.serve.chat.tools import Tool


class TagCalls:
    """Reader of calls such as `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`.

    Each argument is passed on when it is complete, the first one with the call's name. A value ends at the first of its
    end tags, even inside other text.
    """

    def __init__(
        self, text: TextBuffer, collector: DeltaCollector, tools: Mapping[str, Tool], syntax: TagSyntax
    ) -> None:
        self._text = text
        self._collector = collector
        self._tools = tools
        self._syntax = syntax

    def read_call(self) -> Reading[None]:
        """Read a call; see `CallReader`."""
        text, give, syntax = self._text, self._collector.add_arguments, self._syntax
        if syntax.function and not (yield from text.tag(syntax.function)):
            raise ToolCallSyntaxError
        name = yield from self._read_name(syntax.name_end)
        tool = self._tools.get(name)
        if tool is None:
            raise ToolCallSyntaxError
        keys: set[str] = set()
        while (yield from text.tag(syntax.key)):
            key = yield from self._read_key()
            if not key or key in keys:
                raise ToolCallSyntaxError
            value = yield from text.until(syntax.value_end)
            if syntax.on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if not keys:
                self._collector.begin_call(name)
            give("{" if not keys else ", ")
            give(f"{json.dumps(key, ensure_ascii=False)}: {argument_json(value, tool.parameters, key)}")
            keys.add(key)
            text.consume()
        if syntax.function_end and not (yield from text.tag(syntax.function_end)):
            raise ToolCallSyntaxError
        if not keys:
            self._collector.begin_call(name)
        give("}" if keys else "{}")
        text.consume()

    def _read_key(self) -> Reading[str]:
        first, *more = self._syntax.key_end
        key = yield from self._read_name(first)
        for tag in more:
            if not (yield from self._text.tag(tag)):
                raise ToolCallSyntaxError
        return key

    def _read_name(self, end: str) -> Reading[str]:
        """Read the text before `end`, on one line and without angle brackets, and `end` itself.

        Without an `end`, read the text up to the end of the line or to the next tag, and strip it.
        """
        text = self._text
        if not end:
            yield from text.next_character()
        start = text.position
        names = re.compile(rf"[^<>\r\n{re.escape(end[:1])}]*")
        while True:
            run = names.match(text.text, text.position)
            assert run is not None
            text.position = run.end()
            rest = text.text[text.position : text.position + max(1, len(end))]
            if rest and not end:
                return run.string[start : run.end()].strip()
            if end and rest == end:
                text.position += len(end)
                return text.text[start : text.position - len(end)]
            if not end.startswith(rest):
                raise ToolCallSyntaxError
            yield from text.wait()
