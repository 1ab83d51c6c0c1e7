"""Grammars of tool calls in a model's own form, in llguidance's dialect of Lark, and their rules in the making."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ostinato.json_io import JsonObject
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
    BareKeySyntax,
    ChannelSyntax,
    EquationSyntax,
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
        return "thoughts GAP? " if inside else f"({self.tags(tags.begin)} thoughts GAP?)? "

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
        before, marks = self._at_special_token(tag)
        if marks:
            self.rules += [f"{rule}: {name} {marks}", f"{name}: {text}{before}"]
        else:
            self.rules += [f"{rule}[lazy]: {name}", f"{name}: ({text}) & /(?s:.*){regex(tag)}/"]

    def _at_special_token(self, text: str) -> tuple[str, str]:
        """Return the terms of a text before its first special token, and those from there on; "" without one.

        No special token is a part of a text. So a text of any length before one ends there, and needs no rule for it.
        """
        first, *others = self._split(text)
        before = "" if first in self.special_tags else f" {self.tag(first)}"
        return before, " ".join(map(self.tag, others if before else [first, *others]))

    def tags(self, text: str) -> str:
        """Return a text with tags in it, as terms."""
        return " ".join(map(self.tag, self._split(text)))

    def _split(self, text: str) -> list[str]:
        """Return the parts of a text: special tokens, and the texts between them."""
        tokens = "|".join(map(re.escape, sorted(self.special_tags, key=len, reverse=True)))
        return [part for part in re.split(f"({tokens})", text) if part] if tokens else [text]

    def tag(self, tag: str) -> str:
        return f"<[{self.special_tags[tag]}]>" if tag in self.special_tags else json.dumps(tag, ensure_ascii=False)


def regex(tag: str) -> str:
    """Return a regular expression for a tag, to be put between slashes."""
    return re.escape(tag).replace("/", r"\/").replace("\\\n", r"\n")


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
        self._bare: dict[int, tuple[str, object]] = {}
        """Names of the rules for values with bare keys, and their schemas, by the schema's identity."""

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
        if several and form.block_gap is not None and form.separator is None:
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
        if isinstance(self._form.syntax, EquationSyntax):
            self.rules.append(f"REST: /(?s:.*)/{no_reasoning} & ~/(?s:.*) = (?s:.*)/")
            return "(call | REST)"
        if not begin:
            self.rules.append(rf"REST: /(?s:.*)/{no_reasoning} & ~/\s*\{{(?s:.*)/")
            return f"({self._block(several)} | REST)"
        self.up_to("opening", begin, f"/(?s:.*)/{no_reasoning}")
        self.rules.append(f"REST: /(?s:.*)/{no_reasoning} & ~/(?s:.*){regex(begin)}(?s:.*)/")
        return f"(opening {self._block(several)}){'*' if several and self._form.block_gap is not None else '?'} REST"

    def _block(self, several: bool) -> str:
        """Return a term for the text after the begin tag, up to and with the end tag."""
        form = self._form
        more = ""
        if several and form.separator is not None:
            separator = f"{form.separator} " if form.separator.strip() else form.separator or form.gap
            more = f"({json.dumps(separator)} call)*" if separator else "call*"
        end = form.gap if form.end else ""
        return self._terms(form.gap, form.open, "call", more, form.close, end, form.end, rules=("call", more))

    def _terms(self, *texts: str, rules: Collection[str] = ()) -> str:
        """Return texts one after the other, as terms; those among `rules` are terms already."""
        return " ".join(text if text in rules else self.tags(text) for text in texts if text)

    def _write_call(self, index: int, tool: Tool) -> str:
        match self._form.syntax:
            case JsonSyntax() as syntax:
                return self._json_call(tool, syntax)
            case NamedSyntax() as syntax:
                return self._named_call(tool, syntax)
            case TagSyntax() as syntax:
                return self._tag_call(index, tool, syntax)
            case BareKeySyntax() as syntax:
                self._rewritten(tool, tool.parameters)  # which refuses what no grammar can enforce
                return f"{json.dumps(f'call:{tool.name}')} {self._bare_value(tool, tool.parameters, syntax.quote)}"
            case EquationSyntax():
                return r"/(\. | )?[0-9]{1,9} [-+*] [0-9]{1,9} = /"  # a full stop ends the equation before it
            case ChannelSyntax():
                header = f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}"
                return f"{self.tags(header)} {self._arguments(tool)}"
            case _:
                return self._python_call(index, tool)

    def _arguments(self, tool: Tool) -> str:
        return self._value(tool, tool.parameters)

    def _value(self, tool: Tool, schema: object, *place: str) -> str:
        """Return a rule for a JSON value of a schema at a place in the tool's parameters."""
        made = self._rewritten(tool, schema, *place)
        term = f"%json {json.dumps({**made, 'x-guidance': _SPACING}, ensure_ascii=False)}"
        if term not in self._values:
            self._values[term] = f"json_{len(self._values)}"
            self.rules.append(f"{self._values[term]}: {term}")
        return self._values[term]

    def _rewritten(self, tool: Tool, schema: object, *place: str) -> JsonObject:
        """Return the schema at a place in the tool's parameters in the form for the library."""
        try:
            if tool.name not in self._rewriters:
                self._rewriters[tool.name] = SchemaRewriter(tool.parameters)
            return self._rewriters[tool.name].document(schema, place)
        except ValueError as error:
            raise tool.refusal(str(error)) from None

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
        parts = [self.tags(f"{syntax.function}{tool.name}{syntax.name_end}{line}{syntax.after}")]
        for number, (key, (schema, is_required)) in enumerate(_parameters(tool, tool.parameters).items()):
            _check_writable(tool, key, "<>\r\n" + syntax.key_end[0][:1])
            rule = f"parameter_{index}_{number}"
            self.rules.append(f"{rule}: {self._tag_argument(tool, key, schema, syntax)}")
            parts.append(rule if is_required else f"{rule}?")
        if syntax.function_end:
            parts.append(self.tags(syntax.function_end))
        return " ".join(parts)

    def _tag_argument(self, tool: Tool, key: str, schema: object, syntax: TagSyntax) -> str:
        """Return a term for a key and its value, with their tags."""
        line = "\n" if syntax.on_lines else ""
        end = f"{line}{syntax.value_end}{line}{syntax.after}"
        first, *more = syntax.key_end
        as_text, as_json = (
            self.tags(f"{syntax.key}{key}{first}{kind}{''.join(more)}{line}") for kind in syntax.kinds or ("", "")
        )
        if not allows(schema, "string", tool.parameters):
            return f"{as_json} {self._value(tool, schema, 'properties', key)} {self.tags(end)}"
        values = _enumerated(schema, tool.parameters)
        if values is None:
            self._text_rules(syntax.value_end, end)
            resolved = resolve(schema, tool.parameters)
            if not syntax.kinds or (isinstance(resolved, Mapping) and resolved.get("type") == "string"):
                return f"{as_text} text"
            return f"{as_text} text | {as_json} {self._value(tool, schema, 'properties', key)} {self.tags(end)}"
        texts = [value for value in values if value is not None]
        for text in texts:
            _check_writable(tool, text, syntax.value_end, whole=True)
        null = [f'{as_json} "null"'] if None in values else []
        written = [f"{as_text} ({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)})"] if texts else []
        return f"({' | '.join(written + null)}) {self.tags(end)}"

    def _text_rules(self, value_end: str, end: str) -> None:
        """Add rules for a value of any text but the tag that would end it for the parser, and its `end` with that."""
        before, marks = self._at_special_token(end)
        rules = [f"text: TEXT {marks}", f"TEXT: /(?s:.*)/{before}"]
        if not marks:
            rules = ["text[lazy]: TEXT", f"TEXT: (/(?s:.*)/ & ~/(?s:.*){regex(value_end)}(?s:.*)/){before}"]
        if rules[0] not in self.rules:
            self.rules += rules

    def _python_call(self, index: int, tool: Tool) -> str:
        """Return a term for the arguments: each call has all required ones, and a comma before all but the first."""
        members = []
        for key, (schema, is_required) in _parameters(tool, tool.parameters).items():
            _check_writable(tool, key, "" if key.isidentifier() and not keyword.iskeyword(key) else key)
            members.append((f"{json.dumps(key + '=')} {self._value(tool, schema, 'properties', key)}", is_required))
        return f'{json.dumps(tool.name + "(")} {self._members(str(index), members, ", ")} ")"'

    def _members(self, prefix: str, members: Sequence[tuple[str, bool]], comma: str) -> str:
        """Return a rule for terms in a row with commas between them, each required or not."""
        self.rules += [f'first_{prefix}_{len(members)}: ""', f'more_{prefix}_{len(members)}: ""']
        for number, (term, is_required) in enumerate(members):
            rule, following = f"{prefix}_{number}", f"{prefix}_{number + 1}"
            self.rules.append(f"member_{rule}: {term}")
            for name, before in (("first", ""), ("more", f"{json.dumps(comma)} ")):
                left_out = "" if is_required else f" | {name}_{following}"
                self.rules.append(f"{name}_{rule}: {before}member_{rule} more_{following}{left_out}")
        return f"first_{prefix}_0"

    def _bare_value(self, tool: Tool, schema: object, quote: str, *place: str) -> str:
        """Return a rule for a value in the form of `BareKeySyntax`; the library can enforce the schema."""
        try:
            schema = self._rewriters[tool.name].resolved(schema, _ANNOTATIONS)
        except ValueError as error:
            raise tool.refusal(str(error)) from None
        if id(schema) not in self._bare:
            name = f"bare_{len(self._bare)}"
            self._bare[id(schema)] = (name, schema)
            self.rules.append(f"{name}: {self._bare_terms(tool, {} if schema is True else schema, quote, *place)}")
        return self._bare[id(schema)][0]

    def _bare_terms(self, tool: Tool, schema: Any, quote: str, *place: str) -> str:
        def value(part: object, *further: str) -> str:
            return self._bare_value(tool, part, quote, *place, *further)

        asked = {key: part for key, part in schema.items() if key not in _ANNOTATIONS} if schema else {}
        kind = asked.pop("type", next((kind for key, kind in _KIND_OF.items() if key in asked), None))
        kind = "tuple" if kind == "array" and "prefixItems" in asked else kind
        values = [asked.pop("const")] if "const" in asked else asked.pop("enum", None)
        if values is None and kind in ("number", "integer", "boolean", "null"):
            return self._value(tool, schema, *place)
        if values is None and isinstance(kind, list):
            return " | ".join(value({**schema, "type": each}) for each in kind)
        known = _BARE_KEYWORDS.get(kind, ()) if values is None else ()
        allowed = [each for each in values or () if kind is None or _is_a(each, kind)]
        wrong = "false" if schema is False else next((key for key in asked if key not in known), None)
        if wrong or (values is not None and not allowed):
            where = ".".join(("$", *place, wrong or "enum"))
            raise tool.refusal(f"{where} cannot be enforced in this model's tool-call format")
        if values is not None:
            return " | ".join(self.tags(_bare_text(tool, each, quote)) for each in allowed)
        match kind:
            case "anyOf":
                return " | ".join(value(part, "anyOf", str(number)) for number, part in enumerate(asked["anyOf"]))
            case "string":
                return self._bare_string(quote)
            case "tuple":
                others = asked.get("items", True)
                row = "" if others is False else f'("," {value(others, "items")})*'
                for number, part in reversed(list(enumerate(asked["prefixItems"]))):
                    comma = '"," ' if number else ""
                    row = f"({comma}{value(part, 'prefixItems', str(number))} {row})?"
                return f'"[" {row} "]"'
            case "array":
                least, most = int(asked.get("minItems", 0)), asked.get("maxItems")
                if most == 0:
                    return '"[]"'
                item = value(asked.get("items", True), "items")
                more = (
                    "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else int(most) - 1}}}'
                )
                return f'"[" ({item} {more}){"?" if not least else ""} "]"'
            case "object" if "properties" in asked or "required" in asked:
                return self._bare_object(tool, schema, quote, *place)
            case "object":
                if (others := asked.get("additionalProperties", True)) is False:
                    return '"{}"'
                member = f'KEY ":" {value(others, "additionalProperties")}'
                if _BARE_KEY not in self.rules:
                    self.rules.append(_BARE_KEY)
                return f'"{{" ({member} ("," {member})*)? "}}"'
            case _:
                parts = [value(part) for part in ({"type": "array"}, {"type": "object"})]
                return " | ".join([self._bare_string(quote), self._value(tool, _SCALAR), *parts])

    def _bare_object(self, tool: Tool, schema: Mapping[str, Any], quote: str, *place: str) -> str:
        """Return a term for an object. Templates sort its keys."""
        members = []
        for key, (part, is_required) in sorted(_parameters(tool, schema).items(), key=lambda item: item[0].lower()):
            _check_writable(tool, key, '{}[],:"<>' + " \r\n\t")
            value = self._bare_value(tool, part, quote, *place, "properties", key)
            members.append((f"{json.dumps(f'{key}:', ensure_ascii=False)} {value}", is_required))
        return f'"{{" {self._members(self._bare[id(schema)][0], members, ",")} "}}"'

    def _bare_string(self, quote: str) -> str:
        if not any(rule.startswith("quoted") for rule in self.rules):
            self.up_to("quoted", quote, "/(?s:.*)/")
        return f"{self.tags(quote)} quoted"


_BARE_KEY = r'KEY: /[^\s{}\[\],:"<>]+/'
_SCALAR: JsonObject = {"type": ["number", "boolean", "null"]}
_ANNOTATIONS = frozenset(
    ("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description")
) | {"examples", "readOnly", "title", "writeOnly"}
_KIND_OF = {"anyOf": "anyOf", "prefixItems": "tuple", "items": "array", "properties": "object", "required": "object"}
"""Kinds of the schemas that name no type, by a keyword."""
_BARE_KEYWORDS: dict[object, tuple[str, ...]] = {
    "anyOf": ("anyOf",),
    "tuple": ("prefixItems", "items"),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""Keywords of each kind that grammars of the form with bare keys enforce. Those of numbers are the library's."""


def _is_a(value: object, kinds: str | list[str]) -> bool:
    """Return whether a JSON value is of a type, or of one of several."""
    names = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    name = names.get(type(value), "number")
    whole = name == "number" and float(value) == int(value)  # type: ignore[arg-type, call-overload]
    return name in kinds or (whole and "integer" in kinds)


def _bare_text(tool: Tool, value: object, quote: str) -> str:
    """Return a value in the form of `BareKeySyntax`, as templates print it."""
    match value:
        case str():
            _check_writable(tool, value, quote, whole=True)
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(_bare_text(tool, item, quote) for item in value)}]"
        case dict():
            items = sorted(value.items(), key=lambda item: item[0].lower())
            return f"{{{','.join(f'{key}:{_bare_text(tool, item, quote)}' for key, item in items)}}}"
        case _:
            return json.dumps(value)


# Keywords for all arguments of a call together.
_JOINT = (
    *("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
)


def _parameters(tool: Tool, schema: object) -> dict[str, tuple[object, bool]]:
    """Return schema and necessity of each parameter of a tool, or member of an object, for forms that list them."""
    whole = resolve(schema, tool.parameters)
    whole = read_parameters(whole if isinstance(whole, Mapping) else {}, tool.place or f"tool {tool.name}: parameters")
    if found := next((key for key in _JOINT if key in whole), None):
        raise tool.refusal(
            f"{found} of all arguments together cannot be enforced in this model's tool-call format, which writes them "
            "one by one; properties and required can"
        )
    properties, required = dict(whole.get("properties", {})), whole.get("required", ())
    for key in required:
        if properties.setdefault(key, whole.get("additionalProperties", {})) is False:
            raise tool.refusal(f"{key!r} is required, and nothing may be its value")
    return {key: (schema, key in required) for key, schema in properties.items()}


def _enumerated(schema: object, root: Mapping[str, object], depth: int = 3) -> list[str | None] | None:
    """Return all values of a schema that lists them, alone or as alternatives, if they are strings or null."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return None
    if schema.get("type") == "null":
        return [None]
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list) and "enum" not in schema:
        parts = [_enumerated(choice, root, depth - 1) for choice in choices]
        return None if None in parts else [value for part in parts for value in part or ()]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str | None) for value in values):
        return list(values)
    return None


def _check_writable(tool: Tool, text: str, forbidden: str, whole: bool = False) -> None:
    found = forbidden in text if whole else not text or any(character in text for character in forbidden)
    if found:
        raise tool.refusal(f"{text!r} cannot be written in this model's tool-call format; rename it")
