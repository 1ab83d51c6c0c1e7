"""The content of Anthropic's messages: blocks, and the turns of a chat that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ostinato.serve.chat.messages import FunctionCall, Message, ToolCall
from ostinato.serve.http.errors import ApiError

Content = str | Sequence[dict[str, Any]]
Role = Literal["system", "user", "assistant", "tool"]

_KEYS = {
    "text": ("text", "citations"),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking", "signature"),
}
"""Type of block -> members that it may have besides cache_control."""
_SOURCES = {"base64": ("media_type", "data"), "url": ("url",)}
_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "tool": ("text", "image"),
}


@dataclass
class MessageTurn:
    """A message in the form for a chat template."""

    role: Role
    where: str
    """Place in the body of the turn's first message."""
    parts: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Parts of its content, in OpenAI's form, each with its place in the body."""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    call_id: str | None = None
    """Id of the call that a tool's answer belongs to."""

    def message(self) -> Message:
        """Return the turn in the form of chat completions."""
        return Message(
            role=self.role,
            content=[part for part, _ in self.parts],
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
            reasoning_content=self.reasoning or None,
        )


def turns_of(messages: Iterable[tuple[Role, Content, str]]) -> Iterator[MessageTurn]:
    """Yield the turns of messages, which are (role, content, place).

    Neighbours of one role are one turn; each tool_result is a separate turn. ApiError, which names the place, for what
    cannot be taken.
    """
    turn: MessageTurn | None = None
    for role, content, where in messages:
        if turn is not None and turn.role != role:
            yield turn
            turn = None
        if turn is None:
            turn = MessageTurn(role, where)
        has_begun = False
        for block, place in _blocks(content, where, role):
            if block["type"] == "tool_result":
                if turn.parts:
                    yield turn
                yield _result(block, place)
                turn = MessageTurn(role, where)
            else:
                _add(turn, block, place)
            has_begun = True
        if not has_begun:
            raise ApiError(400, f"{where}.content is empty", param=f"{where}.content")
        # Tool results are separate turns already.
        if role == "user" and not turn.parts:
            turn = None
    if turn is not None:
        yield turn


def parts_in(content: Content | None) -> int:
    """Count the blocks of a content, those in tool results included."""
    if content is None or isinstance(content, str):
        return 0
    inner = (block.get("content") for block in content)
    return len(content) + sum(len(each) for each in inner if isinstance(each, list))


def text_in(content: Content, where: str) -> str:
    """Return the text of a content that has nothing but text."""
    return "\n".join(block["text"] for block, _ in _blocks(content, where, "system", inside=""))


def _blocks(content: Content, where: str, role: Role, inside: str = ".content") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (a block without nulls, its place), checked."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, f"{where}{inside}"
        return
    for number, given in enumerate(content):
        place = f"{where}{inside}[{number}]"
        if not isinstance(given, dict):
            raise ApiError(400, f"{place} should be a block, an object with a type", param=place)
        block = {name: value for name, value in given.items() if value is not None and name != "cache_control"}
        kind, allowed = block.get("type"), _OF_ROLE[role]
        if kind not in allowed:
            of_tool = "a tool_result" if role == "tool" else f"{'an' if role == 'assistant' else 'a'} {role} message"
            message = f"{place}.type should be {' or '.join(allowed)}: no other block is taken in {of_tool}"
            raise ApiError(400, message, param=f"{place}.type")
        for name in block:
            if name != "type" and name not in _KEYS[kind]:
                path = f"{place}.{name}"
                raise ApiError(400, f"unknown parameter: {path}", param=path, code="unknown_parameter")
        if kind == "text":
            _needed(block, "text", str, place)
        yield block, place


def _needed(block: dict[str, Any], name: str, kind: type, place: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        what = "a string" if kind is str else "an object"
        raise ApiError(400, f"{place}.{name} should be {what}", param=f"{place}.{name}")
    return value


def _add(turn: MessageTurn, block: dict[str, Any], place: str) -> None:
    if block["type"] == "tool_use":
        function = FunctionCall(name=_needed(block, "name", str, place), arguments=_needed(block, "input", dict, place))
        turn.calls.append(ToolCall(id=_needed(block, "id", str, place), function=function))
    elif block["type"] == "thinking":
        turn.reasoning += _needed(block, "thinking", str, place)
    else:
        turn.parts.append((_part(block, place), place))


def _part(block: dict[str, Any], place: str) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {"type": "image_url", "image_url": {"url": _url(_needed(block, "source", dict, place), f"{place}.source")}}


def _url(source: dict[str, Any], place: str) -> str:
    kind = source.get("type")
    names = _SOURCES.get(kind) if isinstance(kind, str) else None
    if names is None:
        message = f"{place}.type should be {' or '.join(_SOURCES)}: no other image is taken"
        raise ApiError(400, message, param=f"{place}.type")
    for name in source:
        if name not in ("type", *names):
            path = f"{place}.{name}"
            raise ApiError(400, f"unknown parameter: {path}", param=path, code="unknown_parameter")
    values = [_needed(source, name, str, place) for name in names]
    return f"data:{values[0]};base64,{values[1]}" if kind == "base64" else values[0]


def _result(block: dict[str, Any], place: str) -> MessageTurn:
    turn = MessageTurn("tool", place, call_id=_needed(block, "tool_use_id", str, place))
    content = block.get("content", "")
    if not isinstance(content, str | list):
        raise ApiError(400, f"{place}.content should be a string or blocks", param=f"{place}.content")
    for inner, inner_place in _blocks(content, place, "tool"):
        _add(turn, inner, inner_place)
    return turn
