"""Output items of one response, and the events that report their growth."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ostinato.serve.chat.deltas import AnswerDelta, ToolCallDelta


class Event(NamedTuple):
    """An event of the stream, without its sequence number."""

    type: str
    data: dict[str, Any]


class ResponseItems:
    """Builder of items from an answer's deltas: reasoning, messages and calls.

    Each item is complete before the next begins.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """The complete items, and the one that grows, whose text is not in it yet."""
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False

    def take(self, delta: AnswerDelta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Yield the events of a delta. `logprobs` belong to the tokens of its content, if they were requested."""
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.content:
            yield from self._grow("message", delta.content, logprobs)
        for call in delta.tool_calls:
            yield from self._grow_call(call)

    def end(self, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Yield the events of the end.

        The last item gets the response's `status`; an empty answer has one empty message. `logprobs` belong to the
        tokens that ended the answer; they go to the last item if it is a message.
        """
        if not self.items:
            yield from self._begin(_message())
        if logprobs and self.items[-1]["type"] == "message":
            yield from self._grow("message", "", logprobs)
        yield from self._close(status)

    @property
    def _at(self) -> dict[str, Any]:
        """The position of the item that grows."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _grow(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(_message() if kind == "message" else _reasoning())
        self._text.append(text)
        if kind == "message":
            self._logprobs += logprobs
            more = {"content_index": 0, "delta": text, "logprobs": list(logprobs)}
            yield Event("response.output_text.delta", {**self._at, **more})
        else:
            yield Event("response.reasoning_text.delta", {**self._at, "content_index": 0, "delta": text})

    def _grow_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._close("completed")
            yield from self._begin(_call(call))
        if call.arguments:
            self._text.append(call.arguments)
            yield Event("response.function_call_arguments.delta", {**self._at, "delta": call.arguments})

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._text, self._logprobs, self._is_open = [], [], True
        yield Event("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})
        if item["type"] != "function_call":
            yield Event("response.content_part.added", {**self._at, "content_index": 0, "part": _part(item, "", [])})

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text, at = self.items[-1], "".join(self._text), self._at
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {**at, "name": item["name"], "arguments": text}
            yield Event("response.function_call_arguments.done", done)
        else:
            part = _part(item, text, self._logprobs)
            item["content"] = [part]
            at["content_index"] = 0
            if item["type"] == "message":
                yield Event("response.output_text.done", {**at, "text": text, "logprobs": self._logprobs})
            else:
                yield Event("response.reasoning_text.done", {**at, "text": text})
            yield Event("response.content_part.done", {**at, "part": part})
        item["status"] = status
        self._is_open = False
        yield Event("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})


def _message() -> dict[str, Any]:
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning() -> dict[str, Any]:
    return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {
        "id": _id("fc"),
        "type": "function_call",
        "status": "in_progress",
        "call_id": call.id,
        "name": call.name,
        "arguments": "",
    }


def _part(item: dict[str, Any], text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
