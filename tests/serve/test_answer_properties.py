"""Whatever an answer's text and wherever it is cut, its parts are the same, and nothing of it is lost."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.serve.chat.answer_formats import AnswerFormats
from tests.support.answer_cases import CLOCK_TEXT, HERMES, PARIS_TEXT, TOOLCALL, XML, XML_CLOCK, XML_PARIS, parse

FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<thi",
        "nk>",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "call>",
        "<TOOLCALL>",
        "</TOOLCALL>",
        "[",
        "]",
        "{",
        "}",
        ",",
        ", ",
        '"',
        "\\",
        '\\"',
        "\n",
        "\n\n",
        " ",
        "<",
        ">",
        "/",
        "a",
        "é",
        "𝄞",
        "\u2028",
        '{"name": "clock", "arguments": ',
        '"name": "get_weather"',
        '"arguments": {}',
        '"arguments": "{}"',
        "{}",
        '{"city": "Rome"}',
        "<function=clock>",
        "<function=get_weather>",
        "<function=bomb>",
        "</function>",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        "</param",
        "12",
        "null",
        PARIS_TEXT,
        CLOCK_TEXT,
        XML_PARIS,
        XML_CLOCK,
        PARIS_TEXT.replace("get_weather", "bomb"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)
FORMATS = st.sampled_from([HERMES, XML, TOOLCALL, AnswerFormats(None, HERMES.tools)])


@given(text=TEXTS, formats=FORMATS, inside=st.booleans(), data=st.data())
@settings(max_examples=600, deadline=None)
def test_what_deltas_join_to_does_not_depend_on_the_cuts(
    text: str, formats: AnswerFormats, inside: bool, data: st.DataObject
) -> None:
    whole = parse([text], formats, starts_in_reasoning=inside)
    assert parse(list(text), formats, starts_in_reasoning=inside).parts() == whole.parts()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, formats, starts_in_reasoning=inside).parts() == whole.parts()


@given(text=TEXTS)
@example("\n\n")
@settings(max_examples=200, deadline=None)
def test_text_without_a_call_comes_out_as_it_went_in(text: str) -> None:
    joined = parse([text], AnswerFormats(None, HERMES.tools))
    if not joined.calls:
        assert joined.content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(), JSON, max_size=4), ascii_only=st.booleans(), indent=st.sampled_from([None, 2])
)
@settings(max_examples=200, deadline=None)
def test_any_json_arguments_come_out_as_they_were_written(
    arguments: dict[str, object], ascii_only: bool, indent: int | None
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    text = f'<tool_call>\n{{"name": "clock", "arguments": {written}}}\n</tool_call>'
    assert parse(list(text), HERMES).parts() == ("", "", [("clock", written)])
    double = f'<TOOLCALL>[{{"name": "clock", "arguments": {json.dumps(written)}}}]</TOOLCALL>'
    assert parse(list(double), TOOLCALL).parts() == ("", "", [("clock", written)])
