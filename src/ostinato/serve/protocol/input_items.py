"""The items of a response's input, checked, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import Echoed, Ignored, Several
from ostinato.serve.protocol.messages import FunctionCall, Message, Role, ToolCall, one_for_template, text_of


class InputItem(Echoed):
    """A message, a call that the model made, what came of it, or the model's reasoning."""

    type: str = "message"
    role: Role | None = None
    content: str | Several[dict[str, Any]] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | Several[dict[str, Any]] | None = None
    summary: Ignored = None
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None


def template_messages(
    given: str | Sequence[InputItem], instructions: str | None, knows_developer: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages that a chat template is given, and where each stood. ApiError, which names the field, for what is
    none of them."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        places.append("instructions")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], [*places, "input"]
    reasoning = ""
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if item.type == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        message = one_for_template(_message(item, where), where, knows_developer)
        last = messages[-1] if messages else {}
        if item.type == "function_call" and not reasoning and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        messages.append(message)
        places.append(where)
    return messages, places


def _message(item: InputItem, where: str) -> Message:
    if item.type == "message":
        if item.role is None:
            raise ApiError(400, f"{where} has no role", param=f"{where}.role")
        return Message(role=item.role, content=item.content)
    if item.type == "function_call":
        function = FunctionCall(name=_needed(item, "name", where), arguments=_needed(item, "arguments", where))
        return Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=function)])
    if item.type == "function_call_output":
        output = _needed(item, "output", where)
        return Message(role="tool", content=output, tool_call_id=_needed(item, "call_id", where))
    message = f"{where}.type should be message, function_call, function_call_output or reasoning"
    raise ApiError(400, message, param=f"{where}.type")


def _needed(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"{where}.{name} should be given with the type {item.type}", param=f"{where}.{name}")
    return value


def _reasoning(item: InputItem, where: str) -> str:
    if not isinstance(item.content, list):
        return item.content or ""
    parts = [{**part, "type": "text"} if part.get("type") == "reasoning_text" else part for part in item.content]
    return text_of(parts, f"{where}.content")
