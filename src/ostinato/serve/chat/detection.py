"""Detection of a model's reasoning tags and form of tool calls, by a round trip through its chat template.

A call is rendered as an earlier answer's and read back: the form that gives the same call is the model's. A template
that does not print calls, as some do, is identified by the tags in its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.errors import RequestError
from ostinato.serve.chat.answer_parser import AnswerParser
from ostinato.serve.chat.calls.forms import FORMS, HARMONY, ToolCallFormat
from ostinato.serve.chat.formats import ANALYSIS, REASONING, AnswerFormats, ReasoningTags
from ostinato.serve.chat.tools import Tool

_QUESTION, _THOUGHT, _ANSWER = "Zanzibar?", "Mulling.", "Certainly."
_CITY = "Samarkand"
_PROBE = Tool(
    "lookup_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How many."},
            "hourly": {"type": "boolean", "description": "Whether by the hour."},
        },
        "required": ["city"],
    },
)
_ARGUMENTS = {"city": _CITY, "days": 3, "hourly": True}


def detect_formats(template: ChatTemplate) -> AnswerFormats:
    """Return the formats that a chat template writes earlier answers in, or asks the model for."""
    form = _tool_form(template)
    return AnswerFormats(ANALYSIS if form == HARMONY else _reasoning(template), form)


def takes_tools(template: ChatTemplate) -> bool:
    """Return whether a prompt describes tools to the model.

    If the template cannot be rendered alone, its text decides.
    """
    rendered = _rendered(template)
    return "tools" in template.text if rendered is None else _PROBE.name in rendered


def _tool_form(template: ChatTemplate) -> ToolCallFormat | None:
    for rendered in _calls(template):
        answer = rendered[rendered.rfind(_QUESTION) + len(_QUESTION) :]
        if _CITY not in answer:
            continue
        for form in (*FORMS, HARMONY):
            if _reads(form, answer):
                return form
        return None
    return _hinted(template.text)


def _calls(template: ChatTemplate) -> Iterator[str]:
    """Yield renderings of a conversation that ends with a call, in the variants that the template accepts.

    Some templates want ids of nine characters, some want arguments as text, some no content.
    """
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        for content in ("", None):
            function = {"name": _PROBE.name, "arguments": arguments}
            call = {"id": "abcdef123", "type": "function", "function": function}
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            rendered = _rendered(template, answer)
            if rendered is not None:
                yield rendered


def _rendered(template: ChatTemplate, *answer: Mapping[str, Any]) -> str | None:
    """Render a question with a tool, and perhaps an answer; None if the template refuses it."""
    function = {"name": _PROBE.name, "description": _PROBE.description, "parameters": dict(_PROBE.parameters)}
    messages = [{"role": "user", "content": _QUESTION}, *answer]
    try:
        return template.render(
            messages, tools=[{"type": "function", "function": function}], add_generation_prompt=False
        )
    except RequestError:
        return None


def _reads(form: ToolCallFormat, answer: str) -> bool:
    """Return whether the form reads the call back from an answer, perhaps with texts of the template around it."""
    begin = form.begin or "{"
    if (start := answer.find(begin)) < 0:
        return False
    parser = AnswerParser(
        AnswerFormats(None, form), tools=(_PROBE,), starts_in_reasoning=False, new_id=lambda: "call_0"
    )
    deltas = (parser.push(answer[start:]), parser.finish())
    calls = [call for delta in deltas for call in delta.tool_calls]
    if not calls or {call.index for call in calls} != {0} or calls[0].name != _PROBE.name:
        return False
    try:
        return bool(json.loads("".join(call.arguments for call in calls)) == _ARGUMENTS)
    except ValueError:
        return False


def _hinted(text: str) -> ToolCallFormat | None:
    """Return the form whose tags are all in a template's text; of several, the one with the most."""
    fitting = [form for form in (*FORMS, HARMONY) if form.tags and all(tag in text for tag in form.hints or form.tags)]
    return max(fitting, key=lambda form: len(form.tags), default=None)


def _reasoning(template: ChatTemplate) -> ReasoningTags | None:
    """Return the reasoning tags that the template prints, or else those in its text.

    One of two tags is enough in the text: some templates only open reasoning, or only cut it out of earlier answers.
    """
    text = template.text
    rendered = _rendered(template, {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT})
    if rendered is not None and _THOUGHT in rendered:
        before, after = rendered.split(_THOUGHT, 1)
        for tags in REASONING:
            if before.rstrip().endswith(tags.begin) and after.lstrip().startswith(tags.end):
                return tags
    return next((tags for tags in REASONING if tags.begin in text or tags.end in text), None)
