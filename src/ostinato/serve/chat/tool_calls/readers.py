"""Readers of a block of tool calls in an answer's text while it grows, one for each form of calls.

Arguments are JSON, a call in Python, or have tags around each. A text that is no call is one error for all readers.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from ostinato.serve.chat.answer_formats import DeltaCollector
from ostinato.serve.chat.incremental_text import EndOfText, JsonScan, NotJson, Reading, TextBuffer, load_json, members
from ostinato.serve.chat.tool_calls.formats import (
    ARGUMENTS,
    NAME,
    BareKeySyntax,
    EquationSyntax,
    JsonSyntax,
    NamedSyntax,
    TagSyntax,
    ToolCallFormat,
    VariablePart,
)
from ostinato.serve.chat.tools import PYTHON_LITERALS, Tool, argument_json


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


class CallReader:
    """Reader of one call of a syntax in a growing text; it passes the call to a DeltaCollector."""

    def __init__(self, text: TextBuffer, collector: DeltaCollector, tools: Mapping[str, Tool], syntax: Any) -> None:
        self._text, self._collector, self._tools, self._syntax = text, collector, tools, syntax

    def read_call(self) -> Reading[None]:
        """Read a call, and release it once it is recognised. ToolCallSyntaxError if the text is none."""
        raise NotImplementedError

    def _read_tool_name(self, before: str) -> Reading[str]:
        """Return the tool's name that comes next, directly before the character `before`, which is not read."""
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
        if run[0] not in self._tools or text.text[text.position] != before:
            raise ToolCallSyntaxError
        return run[0]


class JsonCalls(CallReader):
    """Reader of calls `{"name": ..., "arguments": {...}}`.

    A call is passed on at the end of its arguments, or as they come if a grammar enforces them. Members may have
    another order, and arguments may be a JSON string of an object, which is unwrapped. Further members of a call are
    ignored, and a missing brace at its end is forgiven.
    """

    def read_call(self) -> Reading[None]:
        text = self._text
        if (yield from text.next_character()) != "{":
            raise ToolCallSyntaxError
        start = scanned = text.position
        scan, pattern = JsonScan(), _header(self._syntax)
        while (header := pattern.match(text.text, start)) is None:
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
        if header[1] not in self._tools:
            raise ToolCallSyntaxError
        yield from read_object(text, self._collector, header[1], within="}")
        yield from self._drop_rest()

    def _give_whole(self, call: str) -> None:
        try:
            name, written = self._parts(members(call))
            arguments = load_json(written)
            if isinstance(arguments, str):
                arguments.encode()  # half of a surrogate pair is no text
                written, arguments = arguments, load_json(arguments)
        except (KeyError, ValueError):
            raise ToolCallSyntaxError from None
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            raise ToolCallSyntaxError
        self._collector.begin_call(name)
        self._text.consume()
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


class NamedCalls(CallReader):
    """Reader of calls that are a name and an object of arguments."""

    def read_call(self) -> Reading[None]:
        text, name = self._text, ""
        parts = [part for part in self._syntax.parts if not (isinstance(part, str) and part.isspace())]
        place = parts.index(ARGUMENTS)
        for part in parts[:place]:
            if isinstance(part, str):
                if not (yield from text.tag(part)):
                    raise ToolCallSyntaxError
            elif part is NAME:
                name = yield from self._run(part)
            else:
                yield from self._run(part)
        if (yield from text.next_character()) != "{" or name not in self._tools:
            raise ToolCallSyntaxError
        yield from read_object(text, self._collector, name)
        yield from read_end(text, *(part for part in parts[place + 1 :] if isinstance(part, str)))

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


def read_object(text: TextBuffer, collector: DeltaCollector, name: str, within: str = "") -> Reading[None]:
    """Read the object that comes next, the arguments of a call of `name`, and pass the call on.

    `within` closes the brackets around the object. The call is passed on as it comes if a grammar enforces it, else at
    the object's end, so that text that is no JSON is no call. Of a call that was cut off, what came of it is passed on.
    ToolCallSyntaxError at a character that is not allowed.
    """
    scan, start = JsonScan(within), text.position
    scanned = start
    if collector.is_enforced:
        collector.begin_call(name)
        text.consume()
        start = scanned = 0
    while True:
        try:
            end = scan.scan(text.text, scanned, depth=len(within))
        except NotJson as error:
            text.position = error.position
            raise ToolCallSyntaxError from None
        if end >= 0:
            break
        if collector.is_enforced:
            collector.add_arguments(text.release_all())
        scanned = len(text.text)
        try:
            yield from text.wait()
        except EndOfText:
            if text.is_cut and not collector.is_enforced:
                collector.begin_call(name)
                collector.add_arguments(text.release_all()[start:])
            raise
    text.position = end
    written = text.text[start:end]
    if not collector.is_enforced:
        try:
            load_json(written)
        except ValueError:
            written = _repaired(written)
        collector.begin_call(name)
    text.consume()
    collector.add_arguments(written)


def _repaired(written: str) -> str:
    """Return arguments in which only line breaks and tabs in strings are no JSON as JSON."""
    try:
        return json.dumps(json.loads(written, strict=False), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise ToolCallSyntaxError from None


def _header(syntax: JsonSyntax) -> re.Pattern[str]:
    """Return a pattern for the beginning of a call whose arguments can be passed on while they come."""
    if syntax.name is None:
        return re.compile(r'\{\s*"([^"\\]*)"\s*:\s*(?=\{)')
    name, arguments = json.dumps(syntax.name), json.dumps(syntax.arguments)
    return re.compile(rf'\{{\s*{name}\s*:\s*"([^"\\]*)"\s*,\s*{arguments}\s*:\s*(?=\{{)')


_NAME = re.compile(r"[a-zA-Z0-9_-]*")
_PLAIN = re.compile(r"""[^'"()\[\]{}\\]*""")
_JSON_NAMES = {"true": True, "false": False, "null": None}
"""JSON's names of constants, which models write too, where Python has other names."""


class PythonCalls(CallReader):
    """Reader of calls `NAME(KEY=VALUE, ...)` whose values are literals. A call is passed on at its end."""

    def read_call(self) -> Reading[None]:
        name = yield from self._read_tool_name("(")
        arguments = _arguments((yield from self._read_parentheses()))
        self._collector.begin_call(name)
        self._collector.add_arguments(arguments)
        self._text.consume()

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
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        written.encode()  # half of a surrogate pair is no text
        return written
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


class _WrittenCall:
    """A call whose arguments are written piece by piece; it is held back unless a grammar enforces it."""

    def __init__(self, text: TextBuffer, collector: DeltaCollector, name: str) -> None:
        self._text, self._collector, self._name = text, collector, name
        self._arguments = ""
        self._position = text.position
        self._has_begun = False

    def add(self, arguments: str) -> None:
        """Add a piece of the arguments, which stands before the text's position."""
        self._arguments += arguments
        self._position = self._text.position
        if self._collector.is_enforced:
            self.pass_on()

    def cut(self) -> None:
        """End the call, because its answer was cut off: pass on what there is of it, if the name is not all."""
        if self._text.is_cut and self._arguments:
            self.pass_on()

    def pass_on(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._collector.begin_call(self._name)
        self._collector.add_arguments(self._arguments)
        self._text.consume(self._position)
        self._arguments, self._position = "", 0


_OF_KIND: Mapping[bool, Mapping[str, object]] = {True: {"type": "string"}, False: {}}
"""Schemas of the values that a form's kinds name as strings, and as others."""


class TagCalls(CallReader):
    """Reader of calls such as `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`.

    A call is passed on at its end, or argument by argument if a grammar enforces it. A value ends at the first of its
    end tags, even inside other text.
    """

    def read_call(self) -> Reading[None]:
        text, collector, syntax = self._text, self._collector, self._syntax
        if syntax.function and not (yield from text.tag(syntax.function)):
            raise ToolCallSyntaxError
        name = yield from self._read_name(syntax.name_end)
        tool = self._tools.get(name)
        if tool is None:
            raise ToolCallSyntaxError
        call, keys = _WrittenCall(text, collector, name), set[str]()
        try:
            while (yield from text.tag(syntax.key)):
                key, kind = yield from self._read_key()
                if not key or key in keys or (syntax.kinds and kind not in syntax.kinds):
                    raise ToolCallSyntaxError
                value = yield from text.until(syntax.value_end)
                if syntax.on_lines:
                    value = value.removeprefix("\n").removesuffix("\n")
                head = f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}"
                parameters = (
                    tool.parameters if not kind else {"additionalProperties": _OF_KIND[kind == syntax.kinds[0]]}
                )
                call.add(f"{head}: {argument_json(value, parameters, key)}")
                keys.add(key)
            if syntax.function_end and not (yield from text.tag(syntax.function_end)):
                raise ToolCallSyntaxError
        except EndOfText:
            call.cut()
            raise
        call.add("}" if keys else "{}")
        call.pass_on()

    def _read_key(self) -> Reading[tuple[str, str]]:
        """Read a key with its end tags; return it and the kind of its value, empty in forms without kinds."""
        first, *more = (tag for tag in self._syntax.key_end if not tag.isspace())
        key, kind = (yield from self._read_name(first)), ""
        if self._syntax.kinds:
            kind = yield from self._read_name(more.pop(0))
        for tag in more:
            if not (yield from self._text.tag(tag)):
                raise ToolCallSyntaxError
        return key, kind

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


class BareKeyCalls(CallReader):
    """Reader of calls `call:NAME{KEY:VALUE,...}`. A call is passed on at its end."""

    def read_call(self) -> Reading[None]:
        text, quote = self._text, self._syntax.quote
        if not (yield from text.tag("call:")):
            raise ToolCallSyntaxError
        name = yield from self._read_tool_name("{")
        start, depth, is_text = text.position, 0, False
        plain = re.compile(rf"[^{{}}\[\]{re.escape(quote[0])}]*")
        while depth or text.position == start:
            run = plain.match(text.text, text.position)
            assert run is not None
            text.position = run.end()
            rest = text.text[text.position : text.position + len(quote)]
            if rest == quote:
                is_text = not is_text
                text.position += len(quote)
            elif quote.startswith(rest):
                yield from text.wait()
            else:
                depth += 0 if is_text else {"{": 1, "[": 1, "}": -1, "]": -1}.get(rest[0], 0)
                text.position += 1
        arguments = _json_of_bare_keys(text.text[start : text.position], quote)
        self._collector.begin_call(name)
        self._collector.add_arguments(arguments)
        text.consume()


def _json_of_bare_keys(written: str, quote: str) -> str:
    """Return the JSON text of an object whose keys have no quotes, and whose strings stand between two of `quote`."""
    parts = written.split(quote)
    made = []
    for place, part in enumerate(parts):
        if place % 2:
            made.append(json.dumps(part, ensure_ascii=False))
            continue
        keyed = _BARE_KEY.sub(lambda found: found[1] + json.dumps(found[2], ensure_ascii=False) + ":", part)
        made.append(_PYTHON_NAME.sub(lambda found: PYTHON_LITERALS[found[0]], keyed))
    text = "".join(made)
    try:
        if not isinstance(load_json(text), dict):
            raise ToolCallSyntaxError
    except ValueError:
        raise ToolCallSyntaxError from None
    return text


_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"][^{}\[\],:\"]*):")
_PYTHON_NAME = re.compile(r"\b(True|False|None)\b(?=\s*([,}\]]|$))")


class EquationCalls(CallReader):
    """Reader of a call `17 + 25 = `. A full stop before it, or before other text, belongs to the equation before it."""

    def read_call(self) -> Reading[None]:
        text = self._text
        yield from text.drop(" .")
        while (equation := _EQUATION.match(text.text)) is None:
            if _EQUATION_BEGIN.fullmatch(text.text) is None:
                raise ToolCallSyntaxError
            yield from text.wait()
        text.position = equation.end()
        text.consume()
        self._collector.begin_call(next(iter(self._tools)))
        self._collector.add_arguments(json.dumps({self._syntax.parameter: equation[1]}))


_EQUATION = re.compile(r"([0-9]+ [-+*] [0-9]+) =")
_EQUATION_BEGIN = re.compile(r"[0-9]+( ([-+*]( ([0-9]+ ?)?)?)?)?")

_READERS: dict[type, type[CallReader]] = {
    JsonSyntax: JsonCalls,
    NamedSyntax: NamedCalls,
    TagSyntax: TagCalls,
    BareKeySyntax: BareKeyCalls,
    EquationSyntax: EquationCalls,
}


class BlockReader:
    """Reader of the blocks of one form."""

    def __init__(
        self, form: ToolCallFormat, text: TextBuffer, collector: DeltaCollector, tools: Mapping[str, Tool]
    ) -> None:
        self._form = form
        self._text = text
        reader = _READERS.get(type(form.syntax), PythonCalls)
        self._call = reader(text, collector, tools, form.syntax)

    def read(self) -> Reading[None]:
        """Read one block, from after its begin tag to after its end tag, and release it.

        ToolCallSyntaxError if the text does not follow the form.
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
        if separator.strip():
            return (yield from self._text.tag(separator))
        before = self._text.position
        ends = yield from self._text.tag(self._form.end)
        self._text.position = before
        return not ends
