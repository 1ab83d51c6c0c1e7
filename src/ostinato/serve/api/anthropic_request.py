"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the conversation in them.

Content blocks become the messages of a chat, and tools those of chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ostinato.engine.text.chat_marks import ChatMark
from ostinato.json_io import JsonObject
from ostinato.sampling.params import SamplingParams
from ostinato.serve.api.generation_fields import GenerationBody, check_model
from ostinato.serve.api.generation_run import ConversationRequest, PreparedChat, prepare_chat
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.cache_marks import check_number, read_cache_control
from ostinato.serve.chat.conversation import (
    Conversation,
    FunctionCall,
    Message,
    ToolCall,
    check_counts,
    checked_tools,
    described,
    one_for_template,
    render,
    template_kwargs,
    token_ids_of,
)
from ostinato.serve.chat.guides import GuideRequest
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.chat.tools import ANTHROPIC_SPELLING, Tool
from ostinato.serve.http.api_errors import NO_THREADS, ApiError, field_error
from ostinato.serve.http.json_bodies import Body, EchoedBody, Ignored, ListOf, unsupported_field
from ostinato.serve.http.unknown_fields import check_members

Content = str | Sequence[JsonObject]
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
    parts: list[tuple[JsonObject, str]] = field(default_factory=list)
    """Parts of its content, in OpenAI's form, each with its place in the body."""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    call_id: str | None = None
    """Id of the call that a tool's answer belongs to."""
    marks: list[tuple[str, float, int | None]] = field(default_factory=list)
    """Marks (place, seconds, number of parts before it; None: after the whole turn)."""

    def mark(self, block: dict[str, Any], place: str) -> None:
        """Note the mark of a block that was just added, if it has one."""
        ttl = read_cache_control(block.get("cache_control"), f"{place}.cache_control")
        if ttl is not None:
            self.marks.append((place, ttl, len(self.parts) if block["type"] in ("text", "image") else None))

    def chat_marks(self, index: int) -> Iterator[ChatMark]:
        """Yield the marks of this turn, which is message `index`."""
        for place, ttl, count in self.marks:
            if count is None or (count == len(self.parts) and not self.calls):
                yield ChatMark(place, ttl, index)
            else:
                texts = [part.get("text", "") for part, _ in self.parts[:count]]
                yield ChatMark(place, ttl, index, count - 1, len("\n".join(texts)))

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
                result = _result(block, place)
                result.mark(block, place)
                yield result
                turn = MessageTurn(role, where)
            else:
                _add(turn, block, place)
                turn.mark(block, place)
            has_begun = True
        if not has_begun:
            raise field_error(f"{where}.content", "is empty")
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


def _blocks(content: Content, where: str, role: Role, inside: str = ".content") -> Iterator[tuple[JsonObject, str]]:
    """Yield (a block without nulls, its place), checked."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, f"{where}{inside}"
        return
    for number, given in enumerate(content):
        place = f"{where}{inside}[{number}]"
        if not isinstance(given, dict):
            raise field_error(place, "should be a block, an object with a type")
        block = {name: value for name, value in given.items() if value is not None}
        kind, allowed = block.get("type"), _OF_ROLE[role]
        if kind not in allowed:
            of_tool = "a tool_result" if role == "tool" else f"{'an' if role == 'assistant' else 'a'} {role} message"
            message = f"{place}.type should be {' or '.join(allowed)}: no other block is taken in {of_tool}"
            raise ApiError(400, message, param=f"{place}.type")
        check_members(block, ("type", *_KEYS[kind], "cache_control"), place)
        if kind == "text":
            _needed(block, "text", str, place)
        yield block, place


def _needed(block: JsonObject, name: str, kind: type, place: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        what = "a string" if kind is str else "an object"
        raise field_error(f"{place}.{name}", f"should be {what}")
    return value


def _add(turn: MessageTurn, block: JsonObject, place: str) -> None:
    if block["type"] == "tool_use":
        function = FunctionCall(name=_needed(block, "name", str, place), arguments=_needed(block, "input", dict, place))
        turn.calls.append(ToolCall(id=_needed(block, "id", str, place), function=function))
    elif block["type"] == "thinking":
        turn.reasoning += _needed(block, "thinking", str, place)
    else:
        turn.parts.append((_part(block, place), place))


def _part(block: JsonObject, place: str) -> JsonObject:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {"type": "image_url", "image_url": {"url": _url(_needed(block, "source", dict, place), f"{place}.source")}}


def _url(source: JsonObject, place: str) -> str:
    kind = source.get("type")
    names = _SOURCES.get(kind) if isinstance(kind, str) else None
    if names is None:
        raise field_error(f"{place}.type", f"should be {' or '.join(_SOURCES)}: no other image is taken")
    check_members(source, ("type", *names), place)
    values = [_needed(source, name, str, place) for name in names]
    return f"data:{values[0]};base64,{values[1]}" if kind == "base64" else values[0]


def _result(block: JsonObject, place: str) -> MessageTurn:
    turn = MessageTurn("tool", place, call_id=_needed(block, "tool_use_id", str, place))
    content = block.get("content", "")
    if not isinstance(content, str | list):
        raise field_error(f"{place}.content", "should be a string or blocks")
    for inner, inner_place in _blocks(content, place, "tool"):
        _add(turn, inner, inner_place)
        turn.mark(inner, inner_place)
    return turn


_TOOL = ("name", "description", "strict")
_IGNORED = ("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers")
"""Members of a tool that are accepted and ignored."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def nested_tools(tools: Sequence[dict[str, object]] | None) -> list[JsonObject] | None:
    """Return tools as `{"type": "function", "function": ...}`. ApiError, with the field, for other kinds."""
    return None if tools is None else [_nested(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _nested(tool: JsonObject, where: str) -> JsonObject:
    tool = {name: value for name, value in tool.items() if value is not None}
    if tool.get("type", "custom") != "custom":
        message = f"{where}.type should be custom: tools of Anthropic's own are not served; define it with a schema"
        raise ApiError(400, message, param=f"{where}.type")
    check_members(tool, (*_TOOL, "input_schema", "type", *_IGNORED), where)
    if not isinstance(tool.get("input_schema"), dict):
        raise field_error(f"{where}.input_schema", "should be a JSON schema, an object")
    function = {name: tool[name] for name in _TOOL if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def nested_choice(choice: JsonObject | None) -> tuple[object, bool]:
    """Return the choice in chat completions' form, and whether calls may be parallel. ApiError if not valid."""
    if choice is None:
        return None, True
    choice = {name: value for name, value in choice.items() if value is not None}
    alone = choice.pop("disable_parallel_tool_use", False)
    match choice:
        case {"type": "auto" | "any" | "none" as kind, **others} if not others and isinstance(alone, bool):
            return _CHOICES[kind], not alone
        case {"type": "tool", "name": str(name), **others} if not others and isinstance(alone, bool):
            return {"type": "function", "function": {"name": name}}, not alone
    message = (
        'tool_choice should be {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": ...} or {"type": "none"}, '
        "and may have disable_parallel_tool_use, which is true or false"
    )
    raise ApiError(400, message, param="tool_choice")


_MADE = "made[{}]"
"""Placeholder in errors for the place of a message made of several, until `with_places` replaces it."""


class InputMessage(EchoedBody):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[JsonObject]
    """Text, or blocks: text, image, tool_use, tool_result, thinking."""


class Thinking(EchoedBody):
    type: Literal["enabled", "adaptive", "disabled"]
    """Value of the chat template's enable_thinking; `adaptive` leaves it unset."""
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(EchoedBody):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")
    """The JSON schema of the answer's text."""


class OutputConfig(EchoedBody):
    effort: str | None = None
    """A variable of the chat template, reasoning_effort."""
    format: OutputFormat | None = None
    """The form of the answer after any thinking."""


class MessagesInput(Body):
    """The fields that make a prompt."""

    model: str | None = None
    """The served model's name, or nothing."""
    messages: ListOf[InputMessage] = Field(min_length=1)
    """The conversation so far. If an assistant's message comes last, it is continued."""
    system: str | ListOf[JsonObject] | None = None
    """A system message before them: text, or blocks of text."""
    tools: ListOf[JsonObject] | None = None
    """Functions that the model may call, each with name, description and input_schema."""
    tool_choice: JsonObject | None = None
    """Choice of the tools that the model may call, with an optional disable_parallel_tool_use.

    The type is `auto`, `any` (the model must call one), `tool` with a name, or `none`.
    """
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: JsonObject | None = None
    """Further variables of the chat template."""
    cache_control: dict[str, Any] | None = None
    """A mark after the last message."""
    context_management: Ignored = None
    diagnostics: Ignored = None
    speed: Annotated[Literal["standard"] | None, unsupported_field("there is one speed", but="standard")] = None
    mcp_servers: Annotated[None, unsupported_field("give the model tools, and call them yourself")] = None
    thread: JsonObject | None = None
    """Refused, in the form after which Anthropic's clients send whole conversations."""

    def to_conversation(self, context: RequestContext) -> ConversationRequest:
        """Return the conversation, and the kind of answer that it asks for. ApiError if something in it is wrong."""
        if self.thread is not None:
            message = "thread: not served; nothing is stored; send the whole conversation as messages"
            raise ApiError(400, message, param="thread", code=NO_THREADS)
        text, settings = context.text, context.settings
        parts = sum(parts_in(message.content) for message in self.messages) + parts_in(self.system)
        check_counts(self.messages, self.tools, settings, num_parts=parts)
        choice, parallel = nested_choice(self.tool_choice)
        tools = checked_tools(text, nested_tools(self.tools), choice, ANTHROPIC_SPELLING)
        thinks = {"enabled": True, "disabled": False}.get("adaptive" if self.thinking is None else self.thinking.type)
        effort = None if self.output_config is None else self.output_config.effort
        turns = list(self._turns())
        continues = turns[-1].role == "assistant"
        if continues and turns[-1].calls:
            raise field_error(turns[-1].where, "calls a tool, and no tool_result follows")
        conversation = Conversation(
            _template_messages(turns, text),
            described(tools.offered_tools),
            template_kwargs(
                text,
                self.chat_template_kwargs,
                effort,
                thinks=thinks,
                tools=tools.offered_tools,
                effort_field="output_config.effort",
            ),
            not continues,
            continues,
            [_MADE.format(place) for place in range(len(turns))],
            self._marks(turns, tools.offered_tools),
        )
        guide = self.guide_request() if isinstance(self, GenerationBody) else None
        return ConversationRequest(conversation, tools.callable, tools.choice, parallel, guide, "messages")

    def _marks(self, turns: Sequence[MessageTurn], offered: Sequence[Tool]) -> list[ChatMark]:
        """Return the marks of tools, then those of messages. ApiError for more than a request may have."""
        marks = []
        for index, tool in enumerate(self.tools or ()):
            place = f"tools[{index}]"
            ttl = read_cache_control(tool.get("cache_control"), f"{place}.cache_control")
            if ttl is not None:
                marks.append(ChatMark(place, ttl, tool=index if offered else len(self.tools or ())))
        marks += [mark for index, turn in enumerate(turns) for mark in turn.chat_marks(index)]
        ttl = read_cache_control(self.cache_control, "cache_control")
        if ttl is not None:
            marks.append(ChatMark("cache_control", ttl, len(turns) - 1))
        check_number(marks, "cache_control")
        return marks

    def _turns(self) -> Iterator[MessageTurn]:
        if self.system is not None:
            turn = MessageTurn("system", "system")
            for block, place in _blocks(self.system, "system", "system", inside=""):
                _add(turn, block, place)
                turn.mark(block, place)
            yield turn
        yield from turns_of((each.role, each.content, f"messages[{i}]") for i, each in enumerate(self.messages))

    def with_places(self, error: ApiError) -> ApiError:
        """Return an error of a message that was made here, with the place of what the client sent."""
        for place, turn in reversed(list(enumerate(self._turns()))):
            made = _MADE.format(place)
            for number, (_, where) in reversed(list(enumerate(turn.parts))):
                error = error.renamed(f"{made}.content[{number}]", where)
            error = error.renamed(made, turn.where)
        return error


def _template_messages(turns: Sequence[MessageTurn], text: ModelText) -> list[JsonObject]:
    return [
        one_for_template(turn.message(), _MADE.format(place), text.knows_developer) for place, turn in enumerate(turns)
    ]


class MessagesRequest(GenerationBody, MessagesInput):
    max_tokens: int = Field(ge=1)
    """Most tokens of output, thinking included."""
    stop_sequences: ListOf[str] | None = None
    """Texts that end the answer."""
    stop: Annotated[None, unsupported_field("give stop_sequences")] = None  # type: ignore[assignment]
    n: Annotated[None, unsupported_field("an answer is one message")] = None  # type: ignore[assignment]
    stream_options: Annotated[None, unsupported_field("a stream always tells of its usage")] = None  # type: ignore[assignment]
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    container: Annotated[None, unsupported_field("nothing is run here")] = None

    def prepare(self, context: RequestContext) -> PreparedChat:
        self.check(context.settings, context.model_name)
        try:
            return prepare_chat(context, self.to_conversation(context), self, max_tokens=self.max_tokens, logprobs=None)
        except ApiError as error:
            raise self.with_places(error) from None

    def stop_strings(self) -> tuple[str, Sequence[str]]:
        return "stop_sequences", self.stop_sequences or ()

    def sampling(self, defaults: SamplingParams, **more: object) -> SamplingParams:
        if self.stop_sequences is not None:
            more["stop"] = self.stop_sequences
        return super().sampling(defaults, **more)

    def parameter_fields(self) -> dict[str, str]:
        return {"stop": "stop_sequences"}

    def _format_request(self) -> GuideRequest | None:
        asked = None if self.output_config is None else self.output_config.format
        return None if asked is None else GuideRequest("output_config.format.schema", "json_schema", asked.schema_)


class CountTokensRequest(MessagesInput):
    """Fields of `/v1/messages`, without those that only the answer depends on."""

    def prepare(self, context: RequestContext) -> bytes:
        """Return the answer's JSON."""
        check_model(self.model, context.model_name, context.settings)
        try:
            rendered = render(context, self.to_conversation(context).conversation)
            count = len(token_ids_of(context, rendered, "messages"))
        except ApiError as error:
            raise self.with_places(error) from None
        return json.dumps({"input_tokens": count}).encode()
