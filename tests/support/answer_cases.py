"""Tools and helpers for tests of answers' text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from ostinato.serve.chat.answer_formats import THINK, AnswerDelta, AnswerFormats
from ostinato.serve.chat.answer_parser import AnswerParser
from ostinato.serve.chat.tool_calls import formats
from ostinato.serve.chat.tools import Tool

HERMES = AnswerFormats(THINK, formats.HERMES)
XML = AnswerFormats(THINK, formats.XML)
TOOLCALL = AnswerFormats(THINK, formats.TOOLCALL)

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"$ref": "#/$defs/Unit"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "hourly": {"type": "boolean"},
            "places": {"type": "array", "items": {"type": "string"}},
            "any": {},
        },
        "required": ["city"],
        "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
    },
)
CLOCK = Tool("clock", "The time.", {"type": "object", "properties": {}})
TOOLS = (WEATHER, CLOCK)

PARIS_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
PARIS_CALL = ("get_weather", '{"city": "Paris", "days": 2}')
CLOCK_TEXT = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
XML_PARIS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
XML_CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"

Call = tuple[str, str]


def numbered_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


class Joined:
    """All that deltas gave, joined as a client joins it; checks the deltas' own rules."""

    def __init__(self, deltas: Iterable[AnswerDelta]) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            assert len({call.index for call in delta.tool_calls}) == len(delta.tool_calls)
            for call in delta.tool_calls:
                if call.name is None:
                    assert call.id is None
                    assert call.index == len(self.calls) - 1
                    assert call.arguments
                else:
                    assert call.id == f"call_{call.index}"
                    assert call.index == len(self.calls)
                    self.calls.append((call.name, ""))
                name, arguments = self.calls[-1]
                self.calls[-1] = name, arguments + call.arguments

    def parts(self) -> tuple[str, str, list[Call]]:
        return self.reasoning, self.content, self.calls


def parse(
    pieces: Sequence[str],
    formats: AnswerFormats,
    *,
    tools: Sequence[Tool] | None = TOOLS,
    starts_in_reasoning: bool = False,
    calls_or_content: bool = False,
    enforced: bool = False,
    is_cut: bool = False,
) -> Joined:
    parser = AnswerParser(
        formats,
        tools=tools,
        starts_in_reasoning=starts_in_reasoning,
        new_id=numbered_ids(),
        calls_or_content=calls_or_content,
        enforced=enforced,
    )
    return Joined([*(parser.push(piece) for piece in pieces), parser.finish(is_cut)])
