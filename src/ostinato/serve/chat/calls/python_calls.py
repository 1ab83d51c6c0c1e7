"""Reader of tool calls that are written as calls in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from ostinato.serve.chat.calls.not_a_call import ToolCallSyntaxError
from ostinato.serve.chat.deltas import DeltaCollector
from ostinato.serve.chat.growing_text import TextBuffer, Reading

_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_PLAIN = re.compile(r"""[^'"()\[\]{}\\]*""")
_JSON_NAMES = {"true": True, "false": False, "null": None}
"""JSON's names of constants, which models write too, where Python has other names."""


class PythonCalls:
    """Reader of calls `NAME(KEY=VALUE, ...)` whose values are literals. A call is passed on at its end."""

    def __init__(self, text: TextBuffer, collector: DeltaCollector, names: Collection[str]) -> None:
        self._text = text
        self._collector = collector
        self._names = names

    def read_call(self) -> Reading[None]:
        """Read a call; see `CallReader`."""
        text = self._text
        yield from text.next_character()
        start = text.position
        while True:
            run = _NAME.match(text.text, start)
            assert run is not None
            text.position = run.end()
            if text.position < len(text.text):
                break
            yield from text.wait()
        if run[0] not in self._names or text.text[text.position] != "(":
            raise ToolCallSyntaxError
        arguments = _arguments((yield from self._read_parentheses()))
        self._collector.begin_call(run[0])
        self._collector.add_arguments(arguments)
        text.consume()

    def _read_parentheses(self) -> Reading[str]:
        """Return the text from one parenthesis to the one that closes it. Brackets in strings do not count."""
        text, start = self._text, self._text.position
        position, depth, quote = start, 0, ""
        while True:
            while position < len(text.text):
                run = _PLAIN.match(text.text, position)
                assert run is not None
                position = run.end()
                if position == len(text.text):
                    break
                character = text.text[position]
                if character == "\\" and position + 1 == len(text.text):
                    break
                position += 2 if character == "\\" else 1
                if quote:
                    quote = "" if character == quote else quote
                elif character in "'\"":
                    quote = character
                elif character in "([{":
                    depth += 1
                elif character in ")]}":
                    depth -= 1
                    if depth == 0:
                        text.position = position
                        return text.text[start:position]
            yield from text.wait()


def _arguments(parenthesised: str) -> str:
    """Return the JSON text of arguments, which are given as `(KEY=VALUE, ...)`."""
    try:
        call = ast.parse(f"f{parenthesised}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ToolCallSyntaxError
        values = {_key(each): _value(each.value) for each in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ToolCallSyntaxError from None


def _key(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ToolCallSyntaxError
    return keyword.arg


def _value(node: ast.expr) -> Any:
    """Return the value of a literal. ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case _:
            return ast.literal_eval(node)
