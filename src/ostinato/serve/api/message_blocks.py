"""Content blocks of one message, and the events that report their growth, in Anthropic's form."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from ostinato.serve.api.answers import compact, quoted
from ostinato.serve.chat.deltas import AnswerDelta, ToolCallDelta

_GROWS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
"""Type of a block -> that of its deltas, and the field that holds the text in both."""


def event(kind: str, data: str = "") -> str:
    """Return an event in wire form; `data` are JSON members with a leading comma."""
    return f'event: {kind}\ndata: {{"type":"{kind}"{data}}}\n\n'


class MessageBlocks:
    """Builder of blocks from an answer's deltas: thinking, text and calls.

    Each block is complete before the next begins.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        """The complete blocks, and the one that grows, whose text is not in it yet."""
        self._text: list[str] = []
        self._is_open = False

    def take(self, delta: AnswerDelta) -> str:
        """Return the events of a delta."""
        events = ""
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        for call in delta.tool_calls:
            events += self._grow_call(call)
        return events

    def end(self) -> str:
        """Return the events that end the last block."""
        if not self._is_open:
            return ""
        block, text = self.blocks[-1], "".join(self._text)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[_GROWS[block["type"]][1]] = text
        self._is_open = False
        return event("content_block_stop", f',"index":{len(self.blocks) - 1}')

    def _grow(self, kind: str, text: str) -> str:
        events = ""
        if not self._is_open or self.blocks[-1]["type"] != kind:
            block = {"type": "text", "text": ""} if kind == "text" else _thinking()
            events = self.end() + self._begin(block)
        of_delta, name = _GROWS[kind]
        return events + self._delta(of_delta, name, text)

    def _grow_call(self, call: ToolCallDelta) -> str:
        events = ""
        if call.name is not None:
            call_id = f"toolu_{(call.id or '').removeprefix('call_')}"
            events = self.end() + self._begin({"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
        if call.arguments:
            events += self._delta("input_json_delta", "partial_json", call.arguments)
        return events

    def _begin(self, block: dict[str, Any]) -> str:
        self.blocks.append(block)
        self._text, self._is_open = [], True
        return event("content_block_start", f',"index":{len(self.blocks) - 1},"content_block":{compact(block)}')

    def _delta(self, kind: str, name: str, text: str) -> str:
        self._text.append(text)
        delta = f'{{"type":"{kind}","{name}":{quoted(text)}}}'
        return event("content_block_delta", f',"index":{len(self.blocks) - 1},"delta":{delta}')


def _thinking() -> dict[str, Any]:
    return {"type": "thinking", "thinking": "", "signature": ""}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call. If they were cut off, return those that are whole."""
    try:
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
