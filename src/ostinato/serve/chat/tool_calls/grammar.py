"""Grammars of tool calls in a model's own form, and the rules of a grammar while they are written.

Rules are in llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Mapping, Sequence

from ostinato.errors import RequestError
from ostinato.sampling.guide import Guide, lark_term
from ostinato.sampling.json_schema import SchemaRewriter
from ostinato.serve.chat.answer_formats import ANALYSIS, ReasoningTags
from ostinato.serve.chat.tool_calls.formats import (
    ARGUMENTS,
    CHANNEL,
    HARMONY,
    MESSAGE,
    NAME,
    START,
    ChannelSyntax,
    JsonSyntax,
    NamedSyntax,
    TagSyntax,
    ToolCallFormat,
)
from ostinato.serve.chat.tools import Tool, allows, read_parameters, resolve


class LarkGrammar:
    """The rules of one grammar while they are written."""

    def __init__(self, special_tags: Mapping[str, int]) -> None:
        self.special_tags = special_tags
        self.rules: list[str] = []

    def text(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self.rules, ""])

    def thoughts(self, tags: ReasoningTags | None, inside: bool) -> str:
        """Return terms for reasoning before anything else: required if the answer begins `inside` it, else optional."""
        if tags is None:
            return ""
        if tags == ANALYSIS:
            self.up_to("thoughts", tags.end, "/(?s:.*)/")
            return f"({self.tags(tags.begin)} thoughts {self.tags(START + 'assistant')})? "
        self.up_to("thoughts", tags.end, "/(?s:.*)/")
        self.rules.append(r"GAP: /\n{1,2}/")
        return "thoughts GAP? " if inside else f"({self.tag(tags.begin)} thoughts GAP?)? "

    def value(self, guide: Guide, in_channel: bool = False) -> str:
        """Return a term for a value of `guide`; `in_channel`: as the message of the channel `final`."""
        self.rules.append(f"value: {lark_term(guide)}")
        return f"{self.final()} value" if in_channel else "value"

    def final(self) -> str:
        """Return a term for the header of a message to the user."""
        return self.tags(f"{CHANNEL}final{MESSAGE}")

    def up_to(self, rule: str, tag: str, text: str) -> None:
        """Add a rule for `text`, a terminal, up to and with the first `tag`."""
        name = rule.upper()
        if tag in self.special_tags:
            self.rules += [f"{rule}: {name} {self.tag(tag)}", f"{name}: {text}"]
        else:
            self.rules += [f"{rule}[lazy]: {name}", f"{name}: ({text}) & /(?s:.*){regex(tag)}/"]

    def tags(self, text: str) -> str:
        """Return a text with tags in it, as terms."""
        return " ".join(self.tag(part) for part in re.split(r"(<\|\w+\|>)", text) if part)

    def tag(self, tag: str) -> str:
        return f"<[{self.special_tags[tag]}]>" if tag in self.special_tags else json.dumps(tag)


def regex(tag: str) -> str:
    """Return a regular expression for a tag, to be put between slashes."""
    return re.escape(tag).replace("/", r"\/")


# JSON as chat templates print it. Models know this form, and it rules out endless white space.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolGrammar(LarkGrammar):
    """A grammar of tool calls in one form."""

    def __init__(self, form: ToolCallFormat, special_tags: Mapping[str, int], tools: Sequence[Tool]) -> None:
        """Begin a grammar of calls of `tools`."""
        super().__init__(special_tags)
        self._form = form
        self._tools = tools
        self._values: dict[str, str] = {}
        """Names of the rules for JSON values."""
        self._rewriters: dict[str, SchemaRewriter] = {}

    def text(self, start: str) -> str:
        """Return the whole grammar. Its rule `call` is a call of one of the tools."""
        for index, tool in enumerate(self._tools):
            self.rules.append(f"call_{index}: {self._write_call(index, tool)}")
        choices = " | ".join(f"call_{index}" for index in range(len(self._tools)))
        self.rules.insert(0, f"call: {choices}")
        return super().text(start)

    def forced_calls(self, several: bool) -> str:
        """Return a term for calls and nothing else."""
        form = self._form
        if form == HARMONY:
            return "call"  # the end of a call is the end of the answer
        block = f"{self._terms(form.begin)} {self._block(several)}".strip()
        if several and form.begin and form.separator is None:
            return f"{block} ({self._terms(form.block_gap)} {block})*"
        return block

    def calls_or_value(self, guide: Guide, several: bool) -> str:
        """Return a term for calls and nothing else, or for a value of `guide` alone."""
        return f"({self.forced_calls(several)} | {self.value(guide, in_channel=self._form == HARMONY)})"

    def free_calls(self, reasoning: ReasoningTags | None, several: bool) -> str:
        """Return a term for any text, in which each call that begins is well-formed."""
        if self._form == HARMONY:
            self.rules.append("REST: /(?s:.*)/")
            return f"(call | {self.final()} REST)"
        # Text that begins like reasoning would be a second way to read the same answer.
        no_reasoning = f" & ~/{regex(reasoning.begin)}(?s:.*)/" if reasoning else ""
        begin = self._form.begin
        if not begin:
            self.rules.append(rf"REST: /(?s:.*)/{no_reasoning} & ~/\s*\{{(?s:.*)/")
            return f"({self._block(several)} | REST)"
        self.up_to("opening", begin, f"/(?s:.*)/{no_reasoning}")
        self.rules.append(f"REST: /(?s:.*)/{no_reasoning} & ~/(?s:.*){regex(begin)}(?s:.*)/")
        return f"(opening {self._block(several)}){'*' if several else '?'} REST"

    def _block(self, several: bool) -> str:
        """Return a term for the text after the begin tag, up to and with the end tag."""
        form = self._form
        more = ""
        if several and form.separator is not None:
            separator = f"{form.separator} " if form.separator else form.gap
            more = f"({json.dumps(separator)} call)*" if separator else "call*"
        end = form.gap if form.end else ""
        return self._terms(form.gap, form.open, "call", more, form.close, end, form.end, rules=("call", more))

    def _terms(self, *texts: str, rules: Collection[str] = ()) -> str:
        """Return texts one after the other, as terms; those among `rules` are terms already."""
        return " ".join(text if text in rules else self.tag(text) for text in texts if text)

    def _write_call(self, index: int, tool: Tool) -> str:
        match self._form.syntax:
            case JsonSyntax() as syntax:
                return self._json_call(tool, syntax)
            case NamedSyntax() as syntax:
                return self._named_call(tool, syntax)
            case TagSyntax() as syntax:
                return self._tag_call(index, tool, syntax)
            case ChannelSyntax():
                header = f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}"
                return f"{self.tags(header)} {self._arguments(tool)}"
            case _:
                return self._python_call(index, tool)

    def _arguments(self, tool: Tool) -> str:
        return self._value(tool, tool.parameters)

    def _value(self, tool: Tool, schema: object, *place: str) -> str:
        """Return a rule for a JSON value of a schema at a place in the tool's parameters."""
        try:
            if tool.name not in self._rewriters:
                self._rewriters[tool.name] = SchemaRewriter(tool.parameters)
            made = self._rewriters[tool.name].document(schema, place)
        except ValueError as error:
            raise RequestError(f"tool {tool.name}: parameters: {error}") from None
        term = f"%json {json.dumps({**made, 'x-guidance': _SPACING}, ensure_ascii=False)}"
        if term not in self._values:
            self._values[term] = f"json_{len(self._values)}"
            self.rules.append(f"{self._values[term]}: {term}")
        return self._values[term]

    def _json_call(self, tool: Tool, syntax: JsonSyntax) -> str:
        head = f'"{tool.name}": '
        if syntax.name is not None:
            head = f'"{syntax.name}": "{tool.name}", "{syntax.arguments}": '
        return f'{json.dumps("{" + head)} {self._arguments(tool)} "}}"'

    def _named_call(self, tool: Tool, syntax: NamedSyntax) -> str:
        terms = []
        for part in syntax.parts:
            if isinstance(part, str):
                terms.append(self.tag(part))
            elif part is NAME:
                terms.append(json.dumps(tool.name))
            elif part is ARGUMENTS:
                terms.append(self._arguments(tool))
            else:
                terms.append(f"/{part.value}/")
        return " ".join(terms)

    def _tag_call(self, index: int, tool: Tool, syntax: TagSyntax) -> str:
        line = "\n" if syntax.on_lines else ""
        parts = [json.dumps(f"{syntax.function}{tool.name}{syntax.name_end}{line}")]
        for number, (key, (schema, is_required)) in enumerate(_parameters(tool).items()):
            _check_writable(tool, key, "<>\r\n" + syntax.key_end[0][:1])
            rule = f"parameter_{index}_{number}"
            value = self._tag_value(tool, key, schema, syntax)
            self.rules.append(f"{rule}: {self._key(key, syntax, line)} {value}")
            parts.append(rule if is_required else f"{rule}?")
        if syntax.function_end:
            parts.append(json.dumps(syntax.function_end))
        return " ".join(parts)

    def _key(self, key: str, syntax: TagSyntax, line: str) -> str:
        """Return a term for a key with its tags. Tags that are special tokens cannot be parts of a text."""
        tags = (syntax.key, *syntax.key_end)
        if not any(tag in self.special_tags for tag in tags):
            return json.dumps(f"{syntax.key}{key}{''.join(syntax.key_end)}{line}")
        return self._terms(syntax.key, key, *syntax.key_end, line)

    def _tag_value(self, tool: Tool, key: str, schema: object, syntax: TagSyntax) -> str:
        """Return a term for a value with its end tag."""
        line = "\n" if syntax.on_lines else ""
        end = json.dumps(f"{line}{syntax.value_end}{line}")
        if syntax.value_end in self.special_tags:
            end = self._terms(line, syntax.value_end, line)
        if not allows(schema, "string", tool.parameters):
            return f"{self._value(tool, schema, 'properties', key)} {end}"
        texts = _enumerated(schema, tool.parameters)
        if texts is None:
            self._text_rules(syntax.value_end, line)
            return "text"
        for text in texts:
            _check_writable(tool, text, syntax.value_end, whole=True)
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}"

    def _text_rules(self, value_end: str, line: str) -> None:
        """Add rules for a value of any text but the tag that would end it for the parser."""
        if value_end in self.special_tags:
            rules = [f"text: TEXT {self._terms(value_end, line)}", f"TEXT: /(?s:.*)/ {json.dumps(line)}"]
        else:
            end = json.dumps(f"{line}{value_end}{line}")
            rules = ["text[lazy]: TEXT", f"TEXT: (/(?s:.*)/ & ~/(?s:.*){regex(value_end)}(?s:.*)/) {end}"]
        if rules[0] not in self.rules:
            self.rules += rules

    def _python_call(self, index: int, tool: Tool) -> str:
        """Return a term for the arguments: each call has all required ones, and a comma before all but the first."""
        parameters = _parameters(tool)
        self.rules += [f'first_{index}_{len(parameters)}: ""', f'more_{index}_{len(parameters)}: ""']
        for number, (key, (schema, is_required)) in enumerate(parameters.items()):
            _check_writable(tool, key, "" if key.isidentifier() and not keyword.iskeyword(key) else key)
            rule, following = f"{index}_{number}", f"{index}_{number + 1}"
            self.rules.append(
                f"parameter_{rule}: {json.dumps(key + '=')} {self._value(tool, schema, 'properties', key)}"
            )
            for name, comma in (("first", ""), ("more", '", " ')):
                left_out = "" if is_required else f" | {name}_{following}"
                self.rules.append(f"{name}_{rule}: {comma}parameter_{rule} more_{following}{left_out}")
        return f'{json.dumps(tool.name + "(")} first_{index}_0 ")"'


# Keywords for all arguments of a call together.
_JOINT = (
    *("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
)


def _parameters(tool: Tool) -> dict[str, tuple[object, bool]]:
    """Return schema and necessity of each parameter of a tool, for forms that write them one by one."""
    whole = resolve(tool.parameters, tool.parameters)
    whole = read_parameters(whole if isinstance(whole, Mapping) else {}, f"tool {tool.name}: parameters")
    if found := next((key for key in _JOINT if key in whole), None):
        raise RequestError(
            f"tool {tool.name}: parameters: {found} of all arguments together cannot be enforced in this model's "
            "tool-call format, which writes them one by one; properties and required can"
        )
    properties, required = dict(whole.get("properties", {})), whole.get("required", ())
    for key in required:
        if properties.setdefault(key, whole.get("additionalProperties", {})) is False:
            raise RequestError(f"tool {tool.name}: parameters: {key!r} is required, and nothing may be its value")
    return {key: (schema, key in required) for key, schema in properties.items()}


def _enumerated(schema: object, root: Mapping[str, object], depth: int = 3) -> list[str] | None:
    """Return all values of a schema that lists them, alone or as alternatives, if they are strings or null."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return None
    if schema.get("type") == "null":
        return ["null"]
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list) and "enum" not in schema:
        parts = [_enumerated(choice, root, depth - 1) for choice in choices]
        return None if None in parts else [text for part in parts for text in part or ()]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str | None) for value in values):
        return ["null" if value is None else value for value in values]
    return None


def _check_writable(tool: Tool, text: str, forbidden: str, whole: bool = False) -> None:
    found = forbidden in text if whole else not text or any(character in text for character in forbidden)
    if found:
        raise RequestError(f"tool {tool.name}: {text!r} cannot be written in this model's tool-call format; rename it")
