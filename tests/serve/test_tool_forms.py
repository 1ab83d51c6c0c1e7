"""Calls in every known form are read back as they were written, and grammars allow just these."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.serve.chat.answer_formats import AnswerFormats
from ostinato.serve.chat.guides import tool_guide
from ostinato.serve.chat.tool_calls import formats
from ostinato.serve.chat.tool_calls.formats import FORMS, ToolCallFormat
from ostinato.serve.chat.tools import Tool
from tests.support.answer_cases import CLOCK, TOOLS, WEATHER, parse
from tests.support.tool_form_cases import written

ONE_CALL = {form for form in FORMS if form.block_gap is None}
"""Forms whose answers have one call."""
CALLS: list[tuple[str, Any]] = [
    ("get_weather", {"city": "Tromsø, north", "days": 3, "hourly": True}),
    ("clock", {}),
    ("get_weather", {"city": "a < b", "places": ["x", "y z"]}),
]
PARTS = st.sampled_from(
    ["[", "]", "{", "}", ",", "\n", " ", "(", ")", "'", '"', "=", ":", "<", ">", "x", "clock", "functions.clock:0"]
    + sorted({tag for form in FORMS for tag in form.tags})
    + [written(form, ("clock", {})) for form in FORMS]
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_calls_come_back_as_they_were_written(form: ToolCallFormat) -> None:
    for calls in [[call] for call in CALLS] + ([] if form in ONE_CALL else [CALLS]):
        text = written(form, *calls)
        for pieces in ([text], list(text)):
            read = parse(pieces, AnswerFormats(None, form))
            assert [(name, json.loads(arguments)) for name, arguments in read.calls] == calls
            assert not read.content


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ONE_CALL], ids=lambda form: form.name)
def test_text_before_calls_is_content_and_an_unknown_name_is_text(form: ToolCallFormat) -> None:
    text = "Let me see.\n" + written(form, ("clock", {}))
    read = parse([text], AnswerFormats(None, form))
    assert read.parts() == ("", "Let me see.", [("clock", "{}")])
    unknown = written(form, ("bomb", {"city": "x"}))
    assert parse([unknown], AnswerFormats(None, form)).parts() == ("", unknown, [])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_of_an_answer_that_ends_anywhere_all_arguments_are_json_and_the_rest_is_content(form: ToolCallFormat) -> None:
    call = CALLS[2]
    text = written(form, call)
    cuts = range(1, len(text))
    for broken in [text[:cut] for cut in cuts] + [text[:cut] + "?" + text[cut + 1 :] for cut in cuts]:
        read = parse([broken], AnswerFormats(None, form))
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in read.calls), broken
        assert read.calls or read.content == broken
        if form is formats.XML:
            assert parse(list(broken), AnswerFormats(None, form)).parts() == read.parts()
    strings = written(form, ("clock", {"a": "\ud800"})) if form is formats.LFM2 else ""
    assert not parse([strings.replace("\ud800", "\\ud800")], AnswerFormats(None, form)).calls


def test_an_answer_without_tags_is_a_call_only_from_its_beginning_on() -> None:
    form = AnswerFormats(None, formats.LLAMA3)
    call = written(formats.LLAMA3, ("clock", {}))
    assert parse([call + "\n"], form).parts() == ("", "", [("clock", "{}")])
    assert parse(["It is: " + call], form).parts() == ("", "It is: " + call, [])
    assert parse(['{"time": 3}'], form).parts() == ("", '{"time": 3}', [])


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("city='it\\'s'", {"city": "it's"}),
        ('city="a)b"', {"city": "a)b"}),
        ("city='x', days=-3", {"city": "x", "days": -3}),
        ("city='x', hourly=true, any=null", {"city": "x", "hourly": True, "any": None}),
        ("any={'a': [1, (2, 3)], 'b': None}", {"any": {"a": [1, [2, 3]], "b": None}}),
    ],
)
def test_python_calls_have_literals_for_arguments(arguments: str, value: object) -> None:
    read = parse([f"<|tool_call_start|>[get_weather({arguments})]<|tool_call_end|>"], AnswerFormats(None, formats.LFM2))
    assert [json.loads(call) for _, call in read.calls] == [value]


@pytest.mark.parametrize(
    "arguments", ["'Rome'", "**{}", "city=open('x')", "city=x.y", "days=1e999", "city=1 if 1 else 2"]
)
def test_python_that_is_no_literal_is_text(arguments: str) -> None:
    text = f"<|tool_call_start|>[get_weather({arguments})]<|tool_call_end|>"
    assert parse([text], AnswerFormats(None, formats.LFM2)).parts() == ("", text, [])


@given(parts=st.lists(PARTS | st.text(max_size=2), max_size=10), form=st.sampled_from(FORMS), data=st.data())
@settings(max_examples=600, deadline=None)
@pytest.mark.slow
def test_what_deltas_join_to_does_not_depend_on_the_cuts_in_any_form(
    parts: list[str], form: ToolCallFormat, data: st.DataObject
) -> None:
    text, formats = "".join(parts), AnswerFormats(None, form)
    whole = parse([text], formats)
    assert parse(list(text), formats).parts() == whole.parts()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, formats).parts() == whole.parts()


class Tokens:
    """A tokenizer whose tokens are the bytes, and a form's tags behind them."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.tags = {tag: 257 + place for place, tag in enumerate(dict.fromkeys(tags))}
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(tag.encode() for tag in self.tags)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def ids(self, text: str) -> list[int]:
        """A text's ids, tags as tokens of their own, the longest that fits first."""
        ids: list[int] = []
        while text:
            tag = max((tag for tag in self.tags if text.startswith(tag)), key=len, default=None)
            ids += [self.tags[tag]] if tag else list(text[0].encode())
            text = text[len(tag) if tag else 1 :]
        return ids


def special_tags(form: ToolCallFormat) -> tuple[str, ...]:
    """Those that may be tokens of their own: not the punctuation between them, nor tags with a token within."""
    tags = [tag for tag in form.tags if re.fullmatch(r"<[^ =]+>|\[\w+\]|｜DSML｜", tag)]
    return tuple(tag for tag in tags if not any(other in tag for other in tags if other != tag))


def accepts(grammar: str, tokens: Tokens, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens))
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.ids(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def canonical(form: ToolCallFormat, *calls: tuple[str, Any]) -> str:
    """As grammars write calls: without white space that only some templates of a form print, and JSON for literals."""
    text = written(form, *calls).strip()
    if form in (formats.GLM, formats.MINIMAX, formats.SEED):
        text = text.replace("\n", "")
        for tag in (form.begin, form.end):
            text = text.replace(tag, f"{tag}{form.gap}" if tag == form.begin else f"{form.gap}{tag}")
    if form is formats.COMMAND:
        text = text.replace("\n", "")
        for place in range(len(calls)):
            text = text.replace(f'"tool_call_id": "{place}", ', "")
    if form is formats.COMMAND_R:
        head, body = text.split("[", 1)
        body = body.replace("\n", "").replace("    ", "").replace('","parameters"', '", "parameters"')
        text = f"{head.rstrip()}\n[{body.replace(',{', ', {')}"
    if form is formats.MISTRAL_LIST:
        text = text.replace(', "id": "abcdef123"', "").replace("] [", "][")
    text = text.replace("None", "null") if form is formats.GEMMA else text
    return text.replace("'", '"') if form is formats.LFM2 else text


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_required_call_is_written_in_the_form_and_nothing_else_is(form: ToolCallFormat, special: bool) -> None:
    tokens = Tokens(special_tags(form) if special else ())
    grammar = tool_guide(TOOLS, "required", AnswerFormats(None, form), special_tags=tokens.tags)
    assert grammar is not None
    city = ("get_weather", {"city": "Rome", "days": 3})
    for calls in ([city], [("clock", {})], [("get_weather", {"city": "Rome"})]):
        text = canonical(form, *calls)
        assert accepts(grammar, tokens, text), text
        assert [(name, json.loads(args)) for name, args in parse([text], AnswerFormats(None, form)).calls] == calls
    assert not accepts(grammar, tokens, canonical(form, ("bomb", {})))
    assert not accepts(grammar, tokens, canonical(form, ("get_weather", {"days": 3})))
    assert not accepts(grammar, tokens, "Hello.")
    assert not accepts(grammar, tokens, "")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_free_answers_are_text_with_calls_that_are_well_formed(form: ToolCallFormat) -> None:
    tokens = Tokens(special_tags(form))
    strict = tuple(Tool(tool.name, tool.description, tool.parameters, strict=True) for tool in (WEATHER, CLOCK))
    grammar = tool_guide(strict, "auto", AnswerFormats(None, form), special_tags=tokens.tags)
    assert grammar is not None
    assert accepts(grammar, tokens, "Hello.")
    assert accepts(grammar, tokens, canonical(form, ("clock", {})))
    assert not accepts(grammar, tokens, canonical(form, ("bomb", {})))
