"""Grammars that force a tool call accept exactly well-formed calls, which the parser reads back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import llguidance
import pytest

from ostinato.errors import RequestError
from ostinato.sampling.guide import Guide
from ostinato.serve.chat.answer_formats import AnswerFormats
from ostinato.serve.chat.guides import tool_guide
from ostinato.serve.chat.tool_calls import formats
from ostinato.serve.chat.tool_calls.formats import EQUATION, FORMS, GENERIC, ToolCallFormat
from ostinato.serve.chat.tools import Tool
from tests.serve.test_tool_forms import Tokens, canonical, special_tags
from tests.serve.test_tool_forms import accepts as form_accepts
from tests.support.answer_cases import CLOCK, HERMES, TOOLCALL, TOOLS, WEATHER, XML, parse

SPECIAL = {"<TOOLCALL>": 257, "</TOOLCALL>": 258, "<think>": 259, "</think>": 260}


class Bytes:
    """A tokenizer whose tokens are the bytes, and some special tokens after them."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(tag.encode() for tag in SPECIAL)]  # noqa: RUF012
    special_token_ids = list(range(256, 257 + len(SPECIAL)))  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def accepts(grammar: str, *text: str) -> bool:
    """Whether the grammar accepts the texts, joined, as a whole answer; special tokens are texts of their own."""
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for part in text:
        tokens += [SPECIAL[part]] if len(text) > 1 and part in SPECIAL else list(part.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def guide(choice: Any, formats: AnswerFormats, tools: tuple[Tool, ...] = TOOLS, **settings: Any) -> str:
    grammar = tool_guide(tools, choice, formats, **settings)
    assert grammar is not None
    return grammar


def named(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


PARIS = '{"city": "Paris", "days": 2, "unit": "celsius"}'
BOTH_IN_A_LIST = (
    f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "clock", "arguments": {{}}}}]</TOOLCALL>'
)


def test_calls_of_the_generic_form_are_enforced_though_the_model_may_choose() -> None:
    own = guide("auto", AnswerFormats(tools=GENERIC), parallel=False)
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
    assert (accepts(own, "Hello."), accepts(own, f"So: {call}")) == (True, True)
    assert not accepts(own, "So: " + call.replace("get_weather", "get_time"))
    assert tool_guide(TOOLS, "none", AnswerFormats(tools=GENERIC)) is None


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("17 + 25 = ", True),
        (". 42 - 9 = ", True),
        ("17 + 25 = 42", False),
        (". #### 33", True),
        ("17 + = ", False),
        ("no idea", True),
    ],
)
def test_the_embedded_models_call_ends_at_the_equals_sign(text: str, accepted: bool) -> None:
    tool = Tool("calculate", "", {"type": "object", "properties": {"expression": {"type": "string"}}})
    assert accepts(guide("auto", AnswerFormats(tools=EQUATION), (tool,)), text) is accepted


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_forced_where_the_model_may_choose(choice: str | None) -> None:
    assert tool_guide(TOOLS, choice, HERMES) is None


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (hermes("get_weather", PARIS), True),
        (hermes("clock", "{}"), True),
        (hermes("clock", "{}") + "\n" + hermes("get_weather", '{"city": ""}'), True),
        (hermes("get_weather", '{"city": "K\u00f6ln \\" <tool_call>"}'), True),
        ("", False),
        ("I cannot.", False),
        (hermes("bomb", "{}"), False),
        (hermes("get_weather", "{}"), False),
        (hermes("get_weather", '{"city": 3}'), False),
        (hermes("get_weather", '{"city": "", "days": 1.5}'), False),
        (hermes("get_weather", '{"city": "", "unit": "kelvin"}'), False),
        (hermes("get_weather", '{"city": ""'), False),
        (hermes("clock", "{}") + "\n", False),
        (hermes("clock", "{}") + " Done.", False),
        (hermes("clock", "{}").removesuffix(">"), False),
    ],
)
def test_a_required_call_in_hermes_form(text: str, accepted: bool) -> None:
    assert accepts(guide("required", AnswerFormats(None, formats.HERMES)), text) is accepted


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (xml("get_weather", city="Paris", days="2", unit="celsius", hourly="true", places='["a"]'), True),
        (xml("get_weather", city=""), True),
        (xml("get_weather", city='two\nlines "and" </param \\ é\n', note="null"), True),
        (xml("clock"), True),
        (xml("clock") + "\n" + xml("clock"), True),
        (xml("bomb"), False),
        (xml("get_weather"), False),
        (xml("get_weather", days="2"), False),
        (xml("get_weather", city="a", days="two"), False),
        (xml("get_weather", city="a", unit="kelvin"), False),
        (xml("get_weather", city="a", hourly="True"), False),
        (xml("get_weather", city="a", other="b"), False),
        (xml("get_weather", city="a", days="1 "), False),
        (xml("get_weather", city="a</parameter>b"), False),
        (xml("clock").removesuffix(">"), False),
    ],
)
def test_a_required_call_in_xml_form(text: str, accepted: bool) -> None:
    assert accepts(guide("required", AnswerFormats(None, formats.XML)), text) is accepted


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('<TOOLCALL>[{"name": "clock", "arguments": {}}]</TOOLCALL>', True),
        (BOTH_IN_A_LIST, True),
        ("<TOOLCALL>[]</TOOLCALL>", False),
        ('<TOOLCALL>[{"name": "clock", "arguments": {}},]</TOOLCALL>', False),
        ('<TOOLCALL>[{"name": "clock", "arguments": "{}"}]</TOOLCALL>', False),
    ],
)  # fmt: skip
def test_a_required_call_in_list_form(text: str, accepted: bool) -> None:
    assert accepts(guide("required", AnswerFormats(None, formats.TOOLCALL)), text) is accepted


def test_a_named_tool_is_called_once_and_no_other_is() -> None:
    grammar = guide(named(CLOCK), HERMES)
    assert accepts(grammar, hermes("clock", "{}"))
    assert not accepts(grammar, hermes("get_weather", PARIS))
    assert not accepts(grammar, hermes("clock", "{}") + "\n" + hermes("clock", "{}"))


@pytest.mark.parametrize("answer", [HERMES, XML, TOOLCALL])
def test_without_parallel_calls_there_is_one(answer: AnswerFormats) -> None:
    assert answer.tools is not None
    one = {
        formats.HERMES: hermes("clock", "{}"),
        formats.XML: xml("clock"),
        formats.TOOLCALL: '<TOOLCALL>[{"name": "clock", "arguments": {}}]</TOOLCALL>',
    }[answer.tools]
    two = f"{one}\n{one}" if answer is not TOOLCALL else one.replace("}]", '}, {"name": "clock", "arguments": {}}]')
    assert accepts(guide("required", answer), two)
    assert accepts(guide("required", answer, parallel=False), one)
    assert not accepts(guide("required", answer, parallel=False), two)


STRICT = (replace(WEATHER, strict=True), CLOCK)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("Hello.\n", True),
        ("", True),
        (f"Let me look.\n{hermes('get_weather', PARIS)}\n\n{hermes('clock', '{}')}\nThere.", True),
        ("<think>\nThe <tool_call>?\n</think>\n\nNo.", True),
        (f"<think>\nHm.\n</think>\n\n{hermes('clock', '{}')}", True),
        (f"The <think> tag. {hermes('clock', '{}')}", True),
        ("The <tool_call> tag.", False),
        (hermes("get_weather", "{}"), False),
        (hermes("bomb", "{}"), False),
        (hermes("clock", "{"), False),
        ("<think>\nThe", False),
    ],
)
def test_strict_tools_allow_any_text_around_well_formed_calls(text: str, accepted: bool) -> None:
    assert accepts(guide("auto", HERMES, STRICT), text) is accepted


def test_strict_tools_allow_one_call_without_parallel_calls() -> None:
    grammar = guide(None, XML, STRICT, parallel=False)
    assert accepts(grammar, f"a {xml('clock')} b")
    assert not accepts(grammar, f"{xml('clock')}{xml('clock')}")


def test_strict_tools_do_with_special_tokens() -> None:
    grammar = guide("auto", TOOLCALL, STRICT, special_tags=SPECIAL)
    call = '[{"name": "clock", "arguments": {}}]'
    assert accepts(grammar, "<think>", "Hm.", "</think>", "\n\nSo: ", "<TOOLCALL>", call, "</TOOLCALL>", " Done.")
    assert not accepts(grammar, "So: ", "<TOOLCALL>", "clock")


def test_strict_tools_demand_nothing_where_none_may_be_called() -> None:
    assert tool_guide(STRICT, "none", HERMES) is None


VERDICT = Guide(json_schema={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["lax", "strict"])
@pytest.mark.parametrize(
    ("formats", "call"),
    [
        (HERMES, hermes("get_weather", PARIS)),
        (XML, xml("get_weather", city="Paris", days="2")),
        (TOOLCALL, '<TOOLCALL>[{"name": "clock", "arguments": {}}]</TOOLCALL>'),
    ],
    ids=["hermes", "xml", "toolcall"],
)
def test_an_answer_of_a_form_beside_tools_is_calls_or_of_that_form(
    formats: AnswerFormats, call: str, tools: tuple[Tool, ...]
) -> None:
    grammar = guide("auto", formats, tools, instead=VERDICT)
    for before in ("", "<think>\nA call, {} or <tool_call>?\n</think>\n\n"):
        assert accepts(grammar, before + call)
        assert accepts(grammar, before + '{"ok": true}')
        for illegal in ("", "Well.", call + '{"ok": true}', '{"ok": true}' + call, '{"ok": 3}', call.replace("e", "x")):
            assert not accepts(grammar, before + illegal), illegal
    inside = guide(None, formats, tools, instead=VERDICT, starts_in_reasoning=True)
    assert accepts(inside, f"Hm.\n</think>\n{call}")
    assert accepts(inside, 'Hm.\n</think>\n{"ok": false}')
    assert not accepts(inside, call)


@pytest.mark.parametrize("instead", [Guide(json_object=True), Guide(regex="<a|b+>"), Guide(choice=("<tool", "{"))])
def test_any_form_may_stand_beside_tools(instead: Guide) -> None:
    grammar = guide("auto", AnswerFormats(None, formats.HERMES), instead=instead)
    assert accepts(grammar, hermes("clock", "{}"))
    legal = {'{"a": [1]}', "<a", "bb>", "<tool", "{"}
    wanted = {'{"a": [1]}'} if instead.json_object else {"<a", "bb>"} if instead.regex else {"<tool", "{"}
    assert {text for text in legal if accepts(grammar, text)} == wanted


def test_beside_a_form_calls_are_as_many_as_they_may_be_and_tags_may_be_special_tokens() -> None:
    two = hermes("clock", "{}") + "\n" + hermes("clock", "{}")
    assert accepts(guide("auto", HERMES, instead=VERDICT), two)
    assert not accepts(guide("auto", HERMES, instead=VERDICT, parallel=False), two)
    special = guide("auto", TOOLCALL, instead=VERDICT, special_tags=SPECIAL)
    assert accepts(special, "<TOOLCALL>", '[{"name": "clock", "arguments": {}}]', "</TOOLCALL>")
    assert accepts(special, "<think>", "Hm.", "</think>", "\n", '{"ok": true}')


@pytest.mark.parametrize("choice", ["required", named(CLOCK)])
def test_a_form_means_nothing_where_a_call_is_demanded(choice: Any) -> None:
    assert guide(choice, HERMES, instead=VERDICT) == guide(choice, HERMES)


def test_a_form_without_tools_that_may_be_called_is_no_grammar_of_calls() -> None:
    assert tool_guide(TOOLS, "none", HERMES, instead=VERDICT) is None
    assert tool_guide((), "auto", HERMES, instead=VERDICT) is None


def test_a_model_that_reasons_may_do_so_before_the_call() -> None:
    call = hermes("clock", "{}")
    grammar = guide("required", HERMES)
    assert accepts(grammar, call)
    assert accepts(grammar, f"<think>\nThe <tool_call>?\n</think>\n\n{call}")
    assert not accepts(grammar, f"Well.</think>{call}")
    assert not accepts(grammar, f"<think>\n{call}")


def test_a_model_that_reasons_already_ends_that_before_the_call() -> None:
    call = xml("clock")
    grammar = guide("required", XML, starts_in_reasoning=True)
    assert accepts(grammar, f"Well.\n</think>\n\n{call}")
    assert not accepts(grammar, call)
    assert not accepts(grammar, f"Well.</think>\nNo.\n{call}")


def test_tags_that_are_special_tokens_are_forced_as_such() -> None:
    grammar = guide("required", TOOLCALL, special_tags=SPECIAL)
    call = '[{"name": "clock", "arguments": {}}]'
    assert accepts(grammar, "<TOOLCALL>", call, "</TOOLCALL>")
    assert accepts(grammar, "<think>", "Well.", "</think>", "\n\n", "<TOOLCALL>", call, "</TOOLCALL>")
    assert not accepts(grammar, f"<TOOLCALL>{call}</TOOLCALL>")
    inside = guide("required", TOOLCALL, special_tags=SPECIAL, starts_in_reasoning=True)
    assert accepts(inside, "Well.", "</think>", "<TOOLCALL>", call, "</TOOLCALL>")


@pytest.mark.parametrize(
    ("formats", "text"),
    [
        (HERMES, f"<think>\nHm.\n</think>\n\n{hermes('get_weather', PARIS)}\n{hermes('clock', '{}')}"),
        (XML, f"{xml('get_weather', city='Paris', days='2', unit='celsius')}\n{xml('clock')}"),
        (
            TOOLCALL,
            BOTH_IN_A_LIST,
        ),
    ],
)
def test_what_a_grammar_accepts_the_parser_reads_back(formats: AnswerFormats, text: str) -> None:
    assert accepts(guide("required", formats), text)
    joined = parse([text], formats)
    assert joined.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in joined.calls] == [
        ("get_weather", json.loads(PARIS)),
        ("clock", {}),
    ]


def test_odd_names_and_references_are_written_as_they_are() -> None:
    unit = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
    schema = {
        "type": "object",
        "properties": {'k"\\ é': {"enum": ['"a"\\', "𝄞"]}, "unit": {"$ref": "#/$defs/U"}, "free": True},
        "required": ['k"\\ é', "unit"],
        "$defs": {"U": unit, "N": {"type": "integer"}},
    }
    tool = Tool("odd", "", schema)
    grammar = guide("required", AnswerFormats(None, formats.XML), (tool,))
    assert accepts(grammar, xml("odd", **{'k"\\ é': '"a"\\', "unit": '{"n": 3}', "free": "[1, null]"}))
    assert accepts(grammar, xml("odd", **{'k"\\ é': "𝄞", "unit": '{"n": 3}'}))
    assert not accepts(grammar, xml("odd", **{'k"\\ é': "b", "unit": '{"n": 3}'}))
    assert not accepts(grammar, xml("odd", **{'k"\\ é': "𝄞", "unit": '{"n": "3"}'}))
    grammar = guide("required", AnswerFormats(None, formats.HERMES), (tool,))
    assert accepts(grammar, hermes("odd", '{"k\\"\\\\ é": "𝄞", "unit": {"n": 3}}'))


ALL_FORMS = [*FORMS, formats.HARMONY]


def call_text(form: ToolCallFormat, name: str, arguments: dict[str, Any]) -> str:
    """A call as a grammar writes it."""
    if form == formats.HARMONY:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return head + json.dumps(arguments)
    return canonical(form, (name, arguments))


def allowed(form: ToolCallFormat, tool: Tool, arguments: dict[str, Any]) -> bool:
    return accepts(guide("required", AnswerFormats(None, form), (tool,)), call_text(form, tool.name, arguments))


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.name)
def test_references_in_parameters_lead_anywhere_in_them_in_every_form(form: ToolCallFormat) -> None:
    tree = {"type": "object", "properties": {"n": {"$ref": "#/properties/count"}, "sub": {"$ref": "#/properties/tree"}}}
    properties = {
        "tree": tree,
        "count": {"type": "integer"},
        "b": {"$ref": "#/properties/tree"},
        "c": {"type": "array", "items": {"$ref": "#/properties/d/prefixItems/0"}},
        "d": {"type": "array", "prefixItems": [{"type": "integer"}]},
        "e": {"type": "array", "items": {"$ref": "#word"}},
    }
    tool = Tool("f", "", {"type": "object", "properties": properties, "$defs": {"w": {"$anchor": "word", "const": 7}}})
    assert allowed(form, tool, {"tree": {"n": 1}, "b": {"sub": {"n": 2}}, "c": [3], "e": [7]})
    for wrong in ({"b": {"n": "x"}}, {"b": {"sub": {"n": []}}}, {"b": {"other": 1}}, {"c": ["x"]}, {"e": [8]}):
        assert not allowed(form, tool, wrong), wrong


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.name)
def test_required_names_without_a_schema_are_written_in_every_form(form: ToolCallFormat) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["x"]})
    assert allowed(form, tool, {"a": 1, "x": [1]})
    assert allowed(form, tool, {"x": 5})
    assert not allowed(form, tool, {"a": 1})
    assert not allowed(form, tool, {"x": 5, "y": 1})
    impossible = replace(tool, parameters={**tool.parameters, "additionalProperties": False})
    if form in (formats.XML, formats.LFM2):
        with pytest.raises(RequestError, match="tool f: parameters: 'x' is required, and nothing may be its value"):
            guide("required", AnswerFormats(None, form), (impossible,))


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}, "k": COUNT}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (TEXT, ["x{],}:y", "", "True"], [3, None]),
        (COUNT, [3], [-1, "3", 1.5]),
        ({"type": "array", "items": COUNT, "minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3]], [[], [1], [1, 2, 3, 4]]),
        ({"type": "array", "items": TEXT, "maxItems": 1}, [[], ["a"]], [["a", "b"], [1]]),
        ({"type": "array", "prefixItems": [COUNT, TEXT], "items": False}, [[], [1], [1, "x"]], [["a"], [1, "x", 3]]),
        ({"$ref": "#/$defs/N"}, [{}, {"n": {"n": {"k": 3}}}], [{"n": {"x": 3}}, {"k": "3"}]),
        ({"anyOf": [{"type": "null"}, TEXT]}, ["q", None], [3]),
        ({"type": ["string", "boolean"]}, [True, "True"], [3]),
        ({"type": "string", "enum": ["u", 3]}, ["u"], [3, "v"]),
        ({"const": {"b": ["x", None], "a": True}}, [{"b": ["x", None], "a": True}], [{"b": ["x"], "a": True}]),
        ({"type": "object", "additionalProperties": COUNT}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["b"]}, [{"b": 1}, {"a": "", "b": []}], [{"a": ""}]),
        ({}, [{"p": [1, "a", {"b": True}]}, [], None, 1.5, "x"], []),
    ],
)
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "text"])
def test_a_form_with_bare_keys_has_rules_of_its_own_for_values(
    special: bool, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    form = formats.GEMMA
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": {"N": NODE}}
    tool = Tool("f", "", parameters)
    tokens = Tokens(special_tags(form) if special else ())
    grammar = tool_guide((tool,), "required", AnswerFormats(None, form), special_tags=tokens.tags)
    assert grammar is not None
    for value in right:
        text = canonical(form, ("f", {"v": value}))
        assert form_accepts(grammar, tokens, text), text
        ((name, arguments),) = parse([text], AnswerFormats(None, form), tools=(tool,)).calls
        assert (name, json.loads(arguments)) == ("f", {"v": value})
    for value in wrong:
        assert not form_accepts(grammar, tokens, canonical(form, ("f", {"v": value}))), value


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "minLength": 3}, "$.properties.v.minLength"),
        ({"type": "array", "items": {"oneOf": [TEXT, COUNT]}}, "$.properties.v.items.oneOf"),
        ({"type": "string", "anyOf": [TEXT]}, "$.properties.v.anyOf"),
        ({"$ref": "#/$defs/N", "required": ["k"]}, "$.properties.v.$ref"),
        ({"type": "integer", "enum": ["x"]}, "$.properties.v.enum"),
        (False, "$.properties.v.false"),
    ],
)
def test_what_the_rules_of_bare_keys_lack_is_refused_by_name(schema: Any, place: str) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"N": NODE}}
    with pytest.raises(RequestError, match=re.escape(f"tool f: parameters: {place} cannot be enforced in this model")):
        tool_guide((Tool("f", "", parameters),), "required", AnswerFormats(None, formats.GEMMA))
    circular = {"type": "object", "properties": {"v": {"$ref": "#/properties/v"}}}
    with pytest.raises(RequestError, match=r"tool f: parameters: "):
        tool_guide((Tool("f", "", circular),), "required", AnswerFormats(None, formats.GEMMA))


def test_descriptions_of_tools_need_no_room_and_what_does_is_said_of_tools() -> None:
    values = [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "string"}}, {"enum": ["a"]}]
    properties = {f"parameter_{i}": {**values[i % 4], "description": "word " * 50} for i in range(10)}
    tools = tuple(
        Tool(f"tool_{i}", "x" * 500, {"type": "object", "properties": properties, "required": ["parameter_0"]})
        for i in range(58)
    )
    assert len(json.dumps([dict(tool.parameters) for tool in tools])) > 100_000
    for form in ALL_FORMS:
        Guide(lark=guide("required", AnswerFormats(None, form), tools))
    grammar = guide("required", AnswerFormats(None, formats.HERMES), tools)
    assert accepts(grammar, hermes("tool_57", '{"parameter_0": "x"}'))
    large = tuple(
        replace(tool, parameters={"type": "object", "properties": {f"{tool.name}_{i}": {} for i in range(200)}})
        for tool in tools
    )
    reason = r"the parameters of the 58 tools that may be called make a grammar of \d+ characters, and may make one of"
    with pytest.raises(RequestError, match=reason):
        guide("required", AnswerFormats(None, formats.HERMES), large)


@pytest.mark.parametrize("form", [formats.HERMES, formats.XML], ids=lambda form: form.name)
def test_parameters_that_are_nested_too_deep_are_refused(form: ToolCallFormat) -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"items": deep}
    tool = Tool("f", "", {"type": "object", "properties": {"a": deep}})
    with pytest.raises(RequestError, match="tool f: parameters: the schema is nested too deep"):
        guide("required", AnswerFormats(None, form), (tool,))


@pytest.mark.parametrize("parameters", [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"minProperties": 1}])
@pytest.mark.parametrize("form", [formats.XML, formats.LFM2], ids=lambda form: form.name)
def test_what_all_arguments_follow_together_is_refused_where_they_are_written_one_by_one(
    form: ToolCallFormat, parameters: dict[str, Any]
) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {}, "b": {}}, **parameters})
    with pytest.raises(RequestError, match=r"tool f: parameters: (anyOf|minProperties) of all arguments together"):
        guide("required", AnswerFormats(None, form), (tool,))
    assert allowed(formats.HERMES, tool, {"b": 1})
    assert not allowed(formats.HERMES, tool, {})


def test_alternatives_that_list_strings_or_null_are_the_values_of_a_tag() -> None:
    unit = {"anyOf": [{"$ref": "#/$defs/U"}, {"type": "null"}]}
    listed = {"enum": ["a", None]}
    parameters = {"type": "object", "properties": {"unit": unit, "l": listed}, "$defs": {"U": {"enum": ["C", "F"]}}}
    grammar = guide("required", XML, (Tool("f", "", parameters),))
    assert accepts(grammar, xml("f", unit="C", l="a"))
    assert accepts(grammar, xml("f", unit="null", l="null"))
    assert not accepts(grammar, xml("f", unit="K"))
    assert not accepts(grammar, xml("f", l="b"))


@pytest.mark.parametrize("form", [formats.HERMES, formats.XML, formats.LFM2], ids=lambda form: form.name)
def test_messages_on_parameters_name_the_tool_and_the_place(form: ToolCallFormat) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(RequestError, match=r"tool f: parameters: \$\.properties\.a\.uniqueItems cannot be enforced"):
        guide("required", AnswerFormats(None, form), (tool,))
    if form == formats.HERMES:
        return
    for wrong in ({"required": None}, {"properties": []}, {"type": "array"}):
        tool = Tool("f", "", {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": wrong}})
        with pytest.raises(RequestError, match=r"tool f: parameters\.(required|properties|type) must be "):
            guide("required", AnswerFormats(None, form), (tool,))


@pytest.mark.parametrize(
    "properties", [{"a>b": {"type": "string"}}, {"": {"type": "string"}}, {"a": {"enum": ["x</parameter>"]}}]
)
def test_what_tags_cannot_hold_is_refused(properties: dict[str, Any]) -> None:
    tool = Tool("f", "", {"type": "object", "properties": properties})
    with pytest.raises(RequestError, match="cannot be written in this model's tool-call format"):
        tool_guide((tool,), "required", XML)


def test_a_model_without_a_format_cannot_be_forced() -> None:
    with pytest.raises(RequestError, match="tool_choice needs a model whose chat template"):
        tool_guide(TOOLS, named(WEATHER), AnswerFormats())
    with pytest.raises(RequestError, match="strict needs a model whose chat template"):
        tool_guide(STRICT, "auto", AnswerFormats())
