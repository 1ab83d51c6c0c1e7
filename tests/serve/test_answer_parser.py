"""Answers are split into reasoning, content and tool calls, whatever the model wrote and however it was cut."""

from __future__ import annotations

import json

import pytest

from ostinato.serve.chat.answer_formats import AnswerDelta, AnswerFormats, ToolCallDelta
from ostinato.serve.chat.answer_parser import AnswerParser
from tests.support.answer_cases import (
    CLOCK_TEXT,
    HERMES,
    PARIS_CALL,
    PARIS_TEXT,
    TOOLCALL,
    TOOLS,
    XML,
    XML_CLOCK,
    XML_PARIS,
    Call,
    numbered_ids,
    parse,
)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nWell.\n\nYes.\n</think>\n\nHello\n", False, "Well.\n\nYes.", "Hello\n"),
        ("\n\n<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("Well.\n</think>\n\nHello", True, "Well.", "Hello"),
        ("\n\nWell.</think>Hello", True, "Well.", "Hello"),
        ("<think>\nWell.\n</think>Hello", True, "Well.", "Hello"),
        ("Well.\n", True, "Well.\n", ""),
        ("Well. </thin", True, "Well. </thin", ""),
        ("<think>Never ends", False, "Never ends", ""),
        ("<thin", False, "", "<thin"),
        ("  Hello <think>x</think>", False, "", "  Hello <think>x</think>"),
        ("Hello</think>", False, "", "Hello</think>"),
        ("<think>a<think>b</think>c</think>", False, "a<think>b", "c</think>"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_stands_before_the_content_without_the_newlines_around_its_tags(
    text: str, inside: bool, reasoning: str, content: str
) -> None:
    assert parse([text], HERMES, starts_in_reasoning=inside).parts() == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (PARIS_TEXT, "", [PARIS_CALL]),
        (f"Let me look.\n{PARIS_TEXT}", "Let me look.", [PARIS_CALL]),
        (f"{PARIS_TEXT}\n{CLOCK_TEXT}\n\n", "", [PARIS_CALL, ("clock", "{}")]),
        (f"a {PARIS_TEXT}\nb\n{CLOCK_TEXT} c", "a\nb c", [PARIS_CALL, ("clock", "{}")]),
        (PARIS_TEXT.replace("\n", ""), "", [PARIS_CALL]),
        # The arguments as they stand, with their own spacing and escapes.
        (
            '<tool_call>{"name":"get_weather","arguments":{"city" :"K\\u00f6ln}\\"","x":[{"<":[]}]}}</tool_call>',
            "",
            [("get_weather", '{"city" :"K\\u00f6ln}\\"","x":[{"<":[]}]}')],
        ),
        # Members in another order, and further ones.
        (
            '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
            "",
            [("get_weather", '{"city": "Rome"}')],
        ),
        ('<tool_call>{"id": 7, "name": "clock", "arguments": { }}</tool_call>', "", [("clock", "{ }")]),
        ('<tool_call>{"name": "clock", "arguments": {}, "id": "x"}</tool_call>', "", [("clock", "{}")]),
        # Of two members of one name, the first.
        ('<tool_call>{"arguments": {}, "name": "clock", "name": "bomb"}</tool_call>', "", [("clock", "{}")]),
        # Arguments that are a JSON string of an object.
        (
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Köln\\"}"}</tool_call>',
            "",
            [("get_weather", '{"city": "Köln"}')],
        ),
        # A forgotten brace, a forgotten end tag.
        ('<tool_call>{"name": "clock", "arguments": {}\n</tool_call>', "", [("clock", "{}")]),
        ('<tool_call>{"name": "clock", "arguments": {}}', "", [("clock", "{}")]),
        ('<tool_call>{"name": "clock", "arguments": {}}\n</tool_c', "", [("clock", "{}")]),
    ],
)
def test_hermes_calls_are_parsed(text: str, content: str, calls: list[Call]) -> None:
    assert parse([text], HERMES).parts() == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Looking.\n\n{XML_PARIS}", "Looking.", [PARIS_CALL]),
        (f"{XML_PARIS}\n{XML_CLOCK}", "", [PARIS_CALL, ("clock", "{}")]),
        (XML_PARIS.replace("\n", ""), "", [PARIS_CALL]),
        (XML_CLOCK.removesuffix("</tool_call>"), "", [("clock", "{}")]),
        (f"{XML_PARIS}\nDone.", "\nDone.", [PARIS_CALL]),
    ],
)
def test_xml_calls_are_parsed(text: str, content: str, calls: list[Call]) -> None:
    assert parse([text], XML).parts() == ("", content, calls)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "Paris", "Paris"),
        ("city", "12", "12"),
        ("city", "\n  two\nlines\n", "\n  two\nlines\n"),
        ("city", "", ""),
        ("city", '<a href="x">"\\</a>', '<a href="x">"\\</a>'),
        ("days", "12", 12),
        ("days", " 12 ", 12),
        ("days", "NaN", "NaN"),
        ("days", "a few", "a few"),
        ("days", "1" * 5000, "1" * 5000),
        ("unit", "celsius", "celsius"),
        ("unit", "true", "true"),
        ("note", "null", None),
        ("note", "None", "None"),
        ("hourly", "true", True),
        ("hourly", "True", True),
        ("hourly", "None", None),
        ("places", '["a", "b"]', ["a", "b"]),
        ("places", "[" * 100_000, "[" * 100_000),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "text", "text"),
        ("unknown", "3.5", 3.5),
    ],
)
def test_values_in_tags_get_the_types_of_their_schema(key: str, value: str, expected: object) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = parse([text], XML).calls
    assert json.loads(arguments) == {key: expected}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]</TOOLCALL>', "", [PARIS_CALL]),
        (
            'So:\n\n<TOOLCALL>[{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": "{}"}]</TOOLCALL>\n',
            "So:",
            [("clock", "{}"), ("clock", "{}")],
        ),
        ('<TOOLCALL> [ {"name": "clock", "arguments": {} } ] </TOOLCALL> x', " x", [("clock", "{}")]),
        ("<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
        (
            '<TOOLCALL>[{"name": "clock", "arguments": {}}, {"name": "bomb", "arguments": {}}]</TOOLCALL>',
            ', {"name": "bomb", "arguments": {}}]</TOOLCALL>',
            [("clock", "{}")],
        ),
        ('<TOOLCALL>[{"name": "clock", "arguments": {}}]</TOOLC', "", [("clock", "{}")]),
    ],
)
def test_lists_of_calls_are_parsed(text: str, content: str, calls: list[Call]) -> None:
    assert parse([text], TOOLCALL).parts() == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        (PARIS_TEXT.replace("get_weather", "get_wether"), HERMES),
        (f"a\n{PARIS_TEXT.replace('get_weather', 'get_wether')} b", HERMES),
        ('<tool_call>{"arguments": {}, "name": "bomb"}</tool_call>', HERMES),
        ('<tool_call>{"name": "clock"}</tool_call>', HERMES),
        ('<tool_call>{"name": "clock", "arguments": null}</tool_call>', HERMES),
        ('<tool_call>{"name": "clock", "arguments": "now"}</tool_call>', HERMES),
        ('<tool_call>{"name": "clock", "arguments": [1]}</tool_call>', HERMES),
        ('<tool_call>{"name": ["clock"], "arguments": {}}</tool_call>', HERMES),
        ("<tool_call>clock()</tool_call>", HERMES),
        ("<tool_call>{}</tool_call>", HERMES),
        ("Use <tool_call> and </tool_call>.", HERMES),
        ('<tool_call>{"name": "clock", "arg', HERMES),
        ('Wait. <tool_call>{"arguments": {"city": "<tool_call>', HERMES),
        ("1 < 2 <tool", HERMES),
        (" \n ", HERMES),
        (XML_PARIS, HERMES),
        (PARIS_TEXT, XML),
        (PARIS_TEXT, TOOLCALL),
        (XML_PARIS.replace("get_weather", "get_wether"), XML),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", XML),
        ("<tool_call>\n<function=get_weather>\nParis</function>", XML),
        ("<tool_call>\n<function=get_weather>\n<parameter=>1</parameter>", XML),
        ("<tool_call><function=clock", XML),
    ],
)
def test_what_is_no_call_of_a_known_tool_is_content_verbatim(text: str, formats: AnswerFormats) -> None:
    assert parse([text], formats).parts() == ("", text, [])


@pytest.mark.parametrize("tools", [None, ()])
def test_without_tools_calls_are_content(tools: tuple[()] | None) -> None:
    text = f"a\n{PARIS_TEXT}\n"
    assert parse([text], HERMES, tools=tools).parts() == ("", text, [])


def test_a_model_without_formats_gives_content_alone() -> None:
    text = f"<think>a</think>\n{PARIS_TEXT}\n"
    assert parse([text], AnswerFormats()).parts() == ("", text, [])


def test_a_call_after_one_of_an_unknown_tool_is_parsed() -> None:
    bomb = CLOCK_TEXT.replace("clock", "bomb")
    assert parse([f"{bomb}\n{CLOCK_TEXT}"], HERMES).parts() == ("", bomb, [("clock", "{}")])


def test_a_call_right_after_reasoning_has_no_content_before_it() -> None:
    text = f"<think>\nThe clock.\n</think>\n\n{CLOCK_TEXT}\n"
    assert parse([text], HERMES).parts() == ("The clock.", "", [("clock", "{}")])


def test_calls_inside_reasoning_are_reasoning() -> None:
    assert parse([f"{CLOCK_TEXT}</think>{CLOCK_TEXT}"], HERMES, starts_in_reasoning=True).parts() == (
        CLOCK_TEXT,
        "",
        [("clock", "{}")],
    )


@pytest.mark.parametrize("enforced", [False, True])
def test_arguments_that_max_tokens_cuts_off_stay_a_call(enforced: bool) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'
    cut = [("get_weather", '{"city": "Par')]
    assert parse([text], HERMES, is_cut=True, enforced=enforced).parts() == ("", "", cut)
    text = XML_PARIS[: XML_PARIS.index("2\n")]
    parts = parse([text], XML, is_cut=True, enforced=enforced).parts()
    assert parts == ("", "\n<parameter=days>\n", [("get_weather", '{"city": "Paris"')])


def test_a_call_that_leaves_its_format_is_content_and_the_next_one_is_a_call() -> None:
    broken = '<tool_call>{"name": "clock", "arguments": {"a": 1]}</tool_call>'
    assert parse([broken + CLOCK_TEXT], HERMES).parts() == ("", broken, [("clock", "{}")])


def test_a_parameter_given_twice_makes_a_call_content() -> None:
    text = XML_PARIS.replace("days", "city")
    assert parse([text], XML).parts() == ("", text, [])


def test_line_breaks_in_the_strings_of_arguments_are_mended() -> None:
    text = PARIS_TEXT.replace("Paris", "Par\nis\t")
    assert parse([text], HERMES).calls == [("get_weather", '{"city": "Par\\nis\\t", "days": 2}')]


def test_content_is_given_out_at_once_but_for_what_may_begin_a_tag() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS, starts_in_reasoning=False, new_id=numbered_ids())
    given = [parser.push(piece).content for piece in ("a", "b <", "to", "p> c\n", "d", " <tool_call")]
    assert given == ["a", "b", "", " <top> c", "\nd", ""]
    assert parser.finish() == AnswerDelta(" <tool_call")


def test_reasoning_is_given_out_at_once_but_for_what_may_begin_its_end() -> None:
    parser = AnswerParser(HERMES, tools=None, starts_in_reasoning=True, new_id=numbered_ids())
    given = [parser.push(piece).reasoning for piece in ("\n", "a", " b\n", "\n<", "/thin", "g\n</think>c")]
    assert given == ["", "a", " b", "", "", "\n\n</thing"]


def test_a_call_is_given_out_when_it_is_complete() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS, starts_in_reasoning=False, new_id=numbered_ids())
    half = len(PARIS_TEXT) // 2
    assert parser.push(PARIS_TEXT[:half]) == AnswerDelta()
    assert parser.push(PARIS_TEXT[half:]) == AnswerDelta(tool_calls=(ToolCallDelta(0, "call_0", *PARIS_CALL),))


def test_arguments_that_a_grammar_enforces_are_given_out_as_they_come() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS, starts_in_reasoning=False, new_id=numbered_ids(), enforced=True)
    pieces = ['<tool_call>{"name": "get_weather",', ' "arguments": {"ci', 'ty": "P', 'aris"}', "}\n</tool", "_call>x"]
    deltas = [parser.push(piece) for piece in pieces]
    assert deltas == [
        AnswerDelta(),
        AnswerDelta(tool_calls=(ToolCallDelta(0, "call_0", "get_weather", '{"ci'),)),
        AnswerDelta(tool_calls=(ToolCallDelta(0, None, None, 'ty": "P'),)),
        AnswerDelta(tool_calls=(ToolCallDelta(0, None, None, 'aris"}'),)),
        AnswerDelta(),
        AnswerDelta("x"),
    ]
    assert parser.finish() == AnswerDelta()


def test_parameters_that_a_grammar_enforces_are_given_out_one_by_one() -> None:
    parser = AnswerParser(XML, tools=TOOLS, starts_in_reasoning=False, new_id=numbered_ids(), enforced=True)
    first, second, third = XML_PARIS.partition("<parameter=days>")
    deltas = [parser.push(piece) for piece in (first, second, third)]
    assert deltas == [
        AnswerDelta(tool_calls=(ToolCallDelta(0, "call_0", "get_weather", '{"city": "Paris"'),)),
        AnswerDelta(),
        AnswerDelta(tool_calls=(ToolCallDelta(0, None, None, ', "days": 2}'),)),
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f'{{"a": "{XML_CLOCK}"}}'.replace("\n", ""), ("", f'{{"a": "{XML_CLOCK}"}}'.replace("\n", ""), [])),
        (f"<think>\nHm.\n</think>\n\nIt: {XML_CLOCK}", ("Hm.", f"It: {XML_CLOCK}", [])),
        (XML_CLOCK, ("", "", [("clock", "{}")])),
        (f"<think>Hm.</think>\n{XML_CLOCK}\n{XML_CLOCK}", ("Hm.", "", [("clock", "{}")] * 2)),
        ("<tool_", ("", "<tool_", [])),
    ],
)
def test_an_answer_that_is_content_or_calls_is_what_it_begins_with(
    text: str, parts: tuple[str, str, list[Call]]
) -> None:
    assert parse([text], XML, calls_or_content=True).parts() == parts
    assert parse(list(text), XML, calls_or_content=True).parts() == parts
