"""Grammars of answers, as Lark text for llguidance: tool calls in a model's own format, and values after reasoning."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ostinato.errors import Remedy, RequestError
from ostinato.sample.guide import Guide, lark_term
from ostinato.serve.chat.formats import AnswerFormats, ReasoningTags, ToolFormat
from ostinato.serve.chat.schemas import allows, resolve
from ostinato.serve.chat.tools import Tool, forced_tools

# JSON as chat templates print it. Models know this form, and it rules out endless white space.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_END_OF_VALUE = "\n</parameter>\n"
# A value of any text but the tag that would end it for the parser.
_TEXT_RULES = [
    "text[lazy]: TEXT",
    rf"TEXT: (/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/) {json.dumps(_END_OF_VALUE)}",
]


def tool_guide(
    tools: Sequence[Tool],
    tool_choice: Any,
    formats: AnswerFormats,
    *,
    starts_in_reasoning: bool = False,
    parallel: bool = True,
    special_tags: Collection[str] = (),
    instead: Guide | None = None,
) -> str | None:
    """The Lark grammar of an answer that calls tools as `tool_choice` demands; None if it demands nothing.

    - "required" allows calls of any of the tools, several in a row if `parallel`. A named function is called once.
    - With "auto", if some tools are `strict`, every call in the answer must be well-formed.
    - With "auto" and `instead`, the answer either consists of calls, as with "required", or has that form.

    A model that reasons may do so first; it must end its reasoning if the prompt began it. `special_tags` are the tags
    of the format that are special tokens of the tokenizer: a grammar does not write these as text.

    Arguments follow their schemas, with properties in the schema's order. In the XML format only parameters that the
    schema names are written, and a string without `enum` or `const` is any text without `</parameter>`. RequestError if
    the choice is malformed, the model has no known format, or the format cannot write a name.
    """
    called = forced_tools(tools, tool_choice)
    may_call = bool(tools) and not called and tool_choice != "none"
    either = may_call and instead is not None
    free = may_call and not either and any(tool.strict for tool in tools)
    if not (called or either or free):
        return None
    if formats.tools is None:
        demand = "tool_choice" if called else "a form of the answer beside tools" if either else "strict"
        remedy = Remedy("tool_choice", "auto" if called else "none") if called or either else Remedy("strict", False)
        raise RequestError(
            f"{demand} needs a model whose chat template shows how it writes tool calls; known are the formats of "
            "Hermes, Qwen3-Coder and Nemotron",
            [remedy],
        )
    grammar = _ToolGrammar(formats.tools, special_tags, called or tools)
    thoughts = grammar.thoughts(formats.reasoning, starts_in_reasoning)
    if instead is not None and either:
        return grammar.text(thoughts + grammar.calls_or_value(instead, parallel))
    if free:
        return grammar.text(thoughts + grammar.free_calls(formats.reasoning, parallel))
    return grammar.text(thoughts + grammar.forced_calls(parallel and tool_choice == "required"))


def value_guide(
    guide: Guide, tags: ReasoningTags, starts_in_reasoning: bool, special_tags: Collection[str] = ()
) -> str:
    """The Lark grammar of what `guide` says (JSON, a regular expression or a choice), after reasoning.

    Reasoning must end if the prompt began it; otherwise it is optional. `special_tags` as for `tool_guide`.
    """
    grammar = _Grammar(special_tags)
    return grammar.text(grammar.thoughts(tags, starts_in_reasoning) + grammar.value(guide))


class _Grammar:
    """The rules of one grammar while they are written."""

    def __init__(self, special_tags: Collection[str]) -> None:
        self._special_tags = special_tags
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def thoughts(self, tags: ReasoningTags | None, inside: bool) -> str:
        """Reasoning before everything else: required if the answer begins `inside` it, else optional."""
        if tags is None:
            return ""
        self._up_to("thoughts", tags.end, "/(?s:.*)/")
        self._rules.append(r"GAP: /\n{1,2}/")
        return "thoughts GAP? " if inside else f"({self._tag(tags.begin)} thoughts GAP?)? "

    def value(self, guide: Guide) -> str:
        """What `guide` says."""
        self._rules.append(f"value: {lark_term(guide)}")
        return "value"

    def _up_to(self, rule: str, tag: str, text: str) -> None:
        """Adds a rule for `text`, a terminal, up to the first `tag`, which it includes."""
        name = rule.upper()
        if tag in self._special_tags:
            self._rules += [f"{rule}: {name} {tag}", f"{name}: {text}"]
        else:
            self._rules += [f"{rule}[lazy]: {name}", f"{name}: ({text}) & /(?s:.*){_regex(tag)}/"]

    def _tag(self, tag: str) -> str:
        return tag if tag in self._special_tags else json.dumps(tag)


class _ToolGrammar(_Grammar):
    """A grammar of tool calls in one format."""

    def __init__(self, tool_format: ToolFormat, special_tags: Collection[str], tools: Sequence[Tool]) -> None:
        """`tools` are those that a call may be of."""
        super().__init__(special_tags)
        self._format = tool_format
        self._tools = tools

    def text(self, start: str) -> str:
        """The whole grammar. Its rule `call` is a call of one of the tools."""
        for index, tool in enumerate(self._tools):
            write = self._xml_call if self._format is ToolFormat.XML else self._json_call
            self._rules.append(f"call_{index}: {write(index, tool)}")
        choices = " | ".join(f"call_{index}" for index in range(len(self._tools)))
        self._rules.insert(0, f"call: {choices}")
        return super().text(start)

    def forced_calls(self, several: bool) -> str:
        """Calls and nothing else."""
        block = f"{self._tag(self._format.begin_tag)} {self._block(several)}"
        if several and self._format is not ToolFormat.TOOLCALL:
            return rf'{block} ("\n" {block})*'
        return block

    def calls_or_value(self, guide: Guide, several: bool) -> str:
        """Calls and nothing else, or only what `guide` says."""
        return f"({self.forced_calls(several)} | {self.value(guide)})"

    def free_calls(self, reasoning: ReasoningTags | None, several: bool) -> str:
        """Any text, with a well-formed call wherever it begins one."""
        # Text that begins like reasoning would be a second way to read the same answer.
        no_reasoning = f" & ~/{_regex(reasoning.begin)}(?s:.*)/" if reasoning else ""
        begin = self._format.begin_tag
        self._up_to("opening", begin, f"/(?s:.*)/{no_reasoning}")
        self._rules.append(f"REST: /(?s:.*)/{no_reasoning} & ~/(?s:.*){_regex(begin)}(?s:.*)/")
        return f"(opening {self._block(several)}){'*' if several else '?'} REST"

    def _block(self, several: bool) -> str:
        """What follows the begin tag, up to the end tag."""
        end = self._tag(self._format.end_tag)
        if self._format is not ToolFormat.TOOLCALL:
            return rf'"\n" call "\n" {end}'
        more = ' (", " call)*' if several else ""
        return f'"[" call{more} "]" {end}'

    def _json_call(self, index: int, tool: Tool) -> str:
        self._rules.append(f"arguments_{index}: {_json_value(tool.parameters, tool.parameters)}")
        head = f'{{"name": "{tool.name}", "arguments": '
        return f'{json.dumps(head)} arguments_{index} "}}"'

    def _xml_call(self, index: int, tool: Tool) -> str:
        parts = [json.dumps(f"<function={tool.name}>\n")]
        required = tool.parameters.get("required", ())
        for number, (key, schema) in enumerate(tool.parameters.get("properties", {}).items()):
            _check_writable(tool, key, "<>\r\n")
            rule = f"parameter_{index}_{number}"
            value = self._xml_value(f"value_{index}_{number}", tool, schema)
            self._rules.append(f"{rule}: {json.dumps(f'<parameter={key}>{chr(10)}')} {value}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join([*parts, '"</function>"'])

    def _xml_value(self, rule: str, tool: Tool, schema: Any) -> str:
        """A value with its end tag."""
        end = json.dumps(_END_OF_VALUE)
        if not allows(schema, "string", tool.parameters):
            self._rules.append(f"{rule}: {_json_value(schema, tool.parameters)}")
            return f"{rule} {end}"
        texts = _enumerated(resolve(schema, tool.parameters))
        if texts is None:
            if _TEXT_RULES[0] not in self._rules:
                self._rules += _TEXT_RULES
            return "text"
        for text in texts:
            _check_writable(tool, text, "</parameter>", whole=True)
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}"


def _regex(tag: str) -> str:
    """A regular expression for a tag, to stand between slashes, which are its only special characters."""
    return tag.replace("/", r"\/")


def _json_value(schema: Any, root: Mapping[str, Any]) -> str:
    """llguidance's term for a JSON value of a schema whose references point into `root`."""
    own = schema if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps({**shared, **own, 'x-guidance': _SPACING}, ensure_ascii=False)}"


def _enumerated(schema: Any) -> list[str] | None:
    """All values of a schema that lists them, if they are strings."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return None


def _check_writable(tool: Tool, text: str, forbidden: str, whole: bool = False) -> None:
    found = forbidden in text if whole else not text or any(character in text for character in forbidden)
    if found:
        raise RequestError(f"tool {tool.name}: {text!r} cannot be written in this model's tool-call format; rename it")
