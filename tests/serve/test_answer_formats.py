"""A round trip through its chat template tells which reasoning tags and tool calls a model writes."""

from __future__ import annotations

import re

import pytest

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.errors import ConfigError, Remedy
from ostinato.serve.chat.answer_formats import REASONING, THINK, AnswerFormats, ReasoningTags, opens_reasoning
from ostinato.serve.chat.answer_parser import detect_formats, takes_tools
from ostinato.serve.chat.tool_calls import formats
from ostinato.serve.chat.tool_calls.formats import FORMS, UNREAD_FORMS, ToolCallFormat, form_problem
from ostinato.serve.settings import ServeSettings
from tests.support.tool_form_cases import CALLS, template_of

# Templates that print no calls: their texts tell.
QWEN3 = """{%- if tools %}{{- 'XML tags:\\n<tool_call>\\n{"name": <function-name>\\n</tool_call>' }}{%- endif %}
{%- set content = messages[0].content.split('</think>')[-1] %}"""
QWEN25 = """{%- if tools %}{{- '<tool_call>\\n{"name": \\n</tool_call>' }}{%- endif %}"""
QWEN3_CODER = (
    "{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n"
    "</function>\\n</tool_call>' }}"
)
NEMOTRON_2 = "{{- '<TOOLCALL>[' -}}{{- ']</TOOLCALL>' -}}{{- '<SPECIAL_11>Assistant\\n<think>\\n' -}}"
LFM2 = "{{ '<|tool_list_start|>' }}{{ tools | tojson }}{{ '<|tool_list_end|>' }}"
LLAMA = "{{- '<|start_header_id|>' + messages[0]['role'] }}"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_form_is_the_one_that_reads_a_written_call_back(form: ToolCallFormat) -> None:
    template = template_of(form)
    assert detect_formats(template) == AnswerFormats(None, form)
    assert takes_tools(template)


def test_each_known_form_has_a_case() -> None:
    assert set(CALLS) == set(FORMS)


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (QWEN3, THINK, formats.HERMES),
        (QWEN25, None, formats.HERMES),
        (QWEN3_CODER, None, formats.XML),
        (QWEN3_CODER + "{{ '<think>\\n' }}", THINK, formats.XML),
        (NEMOTRON_2, THINK, formats.TOOLCALL),
        (LFM2, None, formats.LFM2),
        ("{{ raise_exception('no') }}" + QWEN25, None, formats.HERMES),
        (LLAMA, None, None),
        ("", None, None),
    ],
)
def test_a_template_that_writes_no_calls_is_told_by_the_tags_in_its_text(
    template: str, reasoning: ReasoningTags | None, tools: ToolCallFormat | None
) -> None:
    assert detect_formats(ChatTemplate({"default": template})) == AnswerFormats(reasoning, tools)


TELLS = "{{ tools | tojson }}{{ messages[0].content }}"
"""A template that tells of tools, and shows no call."""


@pytest.mark.parametrize(
    "form", [formats.LFM2, formats.KIMI, formats.DEEPSEEK, formats.GLM], ids=lambda form: form.name
)
def test_tags_in_the_vocabulary_tell_where_the_template_shows_no_form(form: ToolCallFormat) -> None:
    ids = {tag: place for place, tag in enumerate(form.tags)}
    assert detect_formats(ChatTemplate({"default": TELLS}), ids.get).tools is form
    assert detect_formats(ChatTemplate({"default": TELLS})).tools is None
    assert detect_formats(ChatTemplate({"default": "{{ messages[0].content }}"}), ids.get).tools is None
    assert detect_formats(template_of(formats.HERMES), ids.get).tools is formats.HERMES


def test_tags_of_several_forms_in_the_vocabulary_tell_nothing() -> None:
    both = {tag: 1 for form in (formats.COMMAND, formats.TOOLCALL) for tag in form.tags}
    assert detect_formats(ChatTemplate({"default": TELLS}), both.get).tools is None


@pytest.mark.parametrize("form", [*FORMS, formats.HARMONY], ids=lambda form: form.name)
def test_a_setting_names_the_form_and_its_error_lists_those_that_work(form: ToolCallFormat) -> None:
    parser = ServeSettings(tool_call_parser=form.parser).tool_call_parser
    assert detect_formats(ChatTemplate({"default": TELLS}), parser=parser).tools is form
    with pytest.raises(ConfigError, match=f"known are (hermes, .*)?{re.escape(form.parser)}") as caught:
        ServeSettings(tool_call_parser=form.parser.replace("-", "_") + "x")
    assert Remedy("tool_call_parser", form.parser) in caught.value.remedies


def test_a_checkpoint_without_a_template_has_no_formats() -> None:
    assert detect_formats(ChatTemplate({})) == AnswerFormats()
    assert not takes_tools(ChatTemplate({}))


def test_calls_in_a_form_that_cannot_be_read_back_are_not_taken_for_another() -> None:
    text = "".join(template_of(formats.HERMES)._templates.values())
    unknown = text.replace('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "{{ f | string }}")
    assert unknown != text
    assert detect_formats(ChatTemplate({"default": unknown})).tools is None


def test_arguments_may_be_wanted_as_text() -> None:
    text = "".join(template_of(formats.HERMES)._templates.values())
    wants_text = text.replace("{{ f.arguments | tojson }}", "{{ '' + f.arguments }}")
    assert detect_formats(ChatTemplate({"default": wants_text})).tools is formats.HERMES


@pytest.mark.parametrize("tags", REASONING, ids=lambda tags: tags.begin)
def test_reasoning_tags_are_those_around_a_written_thought(tags: ReasoningTags) -> None:
    others = "".join(each.begin for each in REASONING if each is not tags)
    template = (
        f"{{# {others} #}}{{% for message in messages %}}{{% if message.reasoning_content %}}{tags.begin}\n"
        f"{{{{ message.reasoning_content }}}}\n{tags.end}{{% endif %}}{{{{ message.content }}}}{{% endfor %}}"
    )
    assert detect_formats(ChatTemplate({"default": template})).reasoning == tags


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("Assistant\n<think>\n\n", True),
        ("Assistant\n<think>", True),
        ("Assistant\n<think></think>", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_an_answer_begins_in_reasoning_where_the_prompt_ends_with_its_open_tag(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt, AnswerFormats(THINK)) is opens
    assert not opens_reasoning(prompt, AnswerFormats())


def test_tags_are_those_of_reasoning_and_of_tool_calls() -> None:
    both = AnswerFormats(THINK, formats.TOOLCALL)
    assert both.tags == ("<think>", "</think>", "<TOOLCALL>", "</TOOLCALL>")
    assert {"<tool_call>", "</tool_call>"} <= set(AnswerFormats(None, formats.XML).tags)
    assert AnswerFormats().tags == ()


UNREAD = {
    "Kimi K3": '<|open|>call tool="{{ f.name }}" index="1"<|sep|>{% for key, value in f.arguments.items() %}'
    '<|open|>argument key="{{ key }}" type="string"<|sep|>{{ value }}<|close|>argument<|sep|>{% endfor %}'
    "<|close|>call<|sep|>",
    "MiniMax M3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{{ f.name }}">'
    "{% for key, value in f.arguments.items() %}]<]minimax[>[<{{ key }}>{{ value }}]<]minimax[>[</{{ key }}>"
    "{% endfor %}"
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "Solar Open": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
    "{{ f.arguments | tojson }}<|tool_call:end|><|calls|>",
    "Muse Glimmer": "<|start|>assistant to={{ f.name }}<|message|><atem:function_calls>"
    '<atem:invoke name="{{ f.name }}">{% for key, value in f.arguments.items() %}<atem:parameter name="{{ key }}">'
    "{{ value }}</atem:parameter>{% endfor %}</atem:invoke></atem:function_calls><|eot|>",
    "Functionary 3.2": "{{ '>>>all\\n' if message.content }}>>>{{ f.name }}\n{{ f.arguments | tojson }}<|eot_id|>",
}
"""Calls as these models' templates print them, as far as is known."""


@pytest.mark.parametrize("name", UNREAD)
def test_a_form_that_is_not_read_is_named_and_taken_for_no_other(name: str) -> None:
    template = ChatTemplate(
        {
            "default": "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
            "<|{{ message.role }}|>{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
            "{% set f = call.function %}" + UNREAD[name] + "{% endfor %}\n{% endfor %}"
        }
    )
    assert detect_formats(template).tools is None
    assert form_problem(template.text).startswith(f"writes tool calls in the form of {name}, which is not read here")
    assert UNREAD.keys() == UNREAD_FORMS.keys()
    assert form_problem("").startswith("shows none of the known forms of tool calls: Hermes")
