"""A chat template's own text tells which reasoning tags and tool calls its model writes."""

from __future__ import annotations

import pytest

from ostinato.serve.chat.formats import (
    THINK,
    AnswerFormats,
    ReasoningTags,
    ToolFormat,
    detect_formats,
    opens_reasoning,
)

QWEN3 = """{%- if tools %}{{- 'XML tags:\\n<tool_call>\\n{"name": <function-name>' }}{%- endif %}
{%- set content = message.content.split('</think>')[-1] %}"""
QWEN25 = """{%- if tools %}{{- '<tool_call>\\n{"name": ' }}{%- endif %}"""
QWEN3_CODER = "{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\n' }}"
NEMOTRON_2 = "{{- '<TOOLCALL>[' -}}{{- '<SPECIAL_11>Assistant\\n<think>\\n' -}}"
LLAMA = "{{- '<|start_header_id|>' + message['role'] }}"


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (QWEN3, THINK, ToolFormat.HERMES),
        (QWEN25, None, ToolFormat.HERMES),
        (QWEN3_CODER, None, ToolFormat.XML),
        (QWEN3_CODER + "{{ '<think>\\n' }}", THINK, ToolFormat.XML),
        (NEMOTRON_2, THINK, ToolFormat.TOOLCALL),
        (LLAMA, None, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_formats_are_those_that_the_template_names(
    template: str | None, reasoning: ReasoningTags | None, tools: ToolFormat | None
) -> None:
    assert detect_formats(template) == AnswerFormats(reasoning, tools)


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
    both = AnswerFormats(THINK, ToolFormat.TOOLCALL)
    assert both.tags == ("<think>", "</think>", "<TOOLCALL>", "</TOOLCALL>")
    assert AnswerFormats(None, ToolFormat.XML).tags == ("<tool_call>", "</tool_call>")
    assert AnswerFormats().tags == ()
