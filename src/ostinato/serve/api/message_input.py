"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the conversation in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ostinato.sample.params import SamplingParams
from ostinato.serve.api.answers import ConversationRequest, PreparedChat, prepare_chat
from ostinato.serve.api.generation import GenerationBody, check_model
from ostinato.serve.api.message_content import MessageTurn, parts_in, text_in, turns_of
from ostinato.serve.api.message_tools import nested_choice, nested_tools, map_error_fields
from ostinato.serve.chat.conversation import (
    Conversation,
    check_counts,
    checked_tools,
    described,
    render,
    template_kwargs,
    token_ids_of,
)
from ostinato.serve.chat.guides import GuideRequest
from ostinato.serve.chat.messages import one_for_template
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.http.bodies import Body, EchoedBody, Ignored, ListOf, unsupported_field
from ostinato.serve.http.errors import ApiError
from ostinato.serve.work.context import RequestContext

_MADE = "made[{}]"
"""Placeholder in errors for the place of a message made of several, until `with_places` replaces it."""


class InputMessage(EchoedBody):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[dict[str, Any]]
    """Text, or blocks: text, image, tool_use, tool_result, thinking."""


class Thinking(EchoedBody):
    type: Literal["enabled", "adaptive", "disabled"]
    """Value of the chat template's enable_thinking; `adaptive` leaves it unset."""
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(EchoedBody):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
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
    system: str | ListOf[dict[str, Any]] | None = None
    """A system message before them: text, or blocks of text."""
    tools: ListOf[dict[str, Any]] | None = None
    """Functions that the model may call, each with name, description and input_schema."""
    tool_choice: dict[str, Any] | None = None
    """Choice of the tools that the model may call, with an optional disable_parallel_tool_use.

    The type is `auto`, `any` (the model must call one), `tool` with a name, or `none`.
    """
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    speed: Annotated[Literal["standard"] | None, unsupported_field("there is one speed", but="standard")] = None
    mcp_servers: Annotated[None, unsupported_field("give the model tools, and call them yourself")] = None

    def to_conversation(self, work: RequestContext) -> ConversationRequest:
        """Return the conversation, and the kind of answer that it asks for. ApiError if something in it is wrong."""
        text, settings = work.text, work.settings
        parts = sum(parts_in(message.content) for message in self.messages) + parts_in(self.system)
        check_counts(self.messages, self.tools, settings, num_parts=parts)
        with map_error_fields():
            choice, parallel = nested_choice(self.tool_choice)
            tools = checked_tools(text, nested_tools(self.tools), choice)
        kwargs = dict(self.chat_template_kwargs or {})
        if self.thinking is not None and self.thinking.type != "adaptive":
            kwargs.setdefault("enable_thinking", self.thinking.type == "enabled")
        effort = None if self.output_config is None else self.output_config.effort
        turns = list(self._turns())
        continues = turns[-1].role == "assistant"
        if continues and turns[-1].calls:
            message = f"{turns[-1].where} calls a tool, and no tool_result follows"
            raise ApiError(400, message, param=turns[-1].where)
        conversation = Conversation(
            _template_messages(turns, text),
            described(tools.offered_tools),
            template_kwargs(kwargs, effort),
            not continues,
            continues,
            [_MADE.format(place) for place in range(len(turns))],
        )
        guide = self.guide_request() if isinstance(self, GenerationBody) else None
        return ConversationRequest(conversation, tools.callable, tools.choice, parallel, guide, "messages")

    def _turns(self) -> Iterator[MessageTurn]:
        if self.system is not None:
            yield MessageTurn("system", "system", parts=[({"type": "text", "text": text_in(self.system, "system")}, "system")])
        yield from turns_of((each.role, each.content, f"messages[{i}]") for i, each in enumerate(self.messages))

    def with_places(self, error: ApiError) -> ApiError:
        """Return an error of a message that was made here, with the place of what the client sent."""
        message, param = error.message, error.param or ""
        for place, turn in reversed(list(enumerate(self._turns()))):
            made = _MADE.format(place)
            for number, (_, where) in reversed(list(enumerate(turn.parts))):
                part = f"{made}.content[{number}]"
                message, param = message.replace(part, where), param.replace(part, where)
            message, param = message.replace(made, turn.where), param.replace(made, turn.where)
        return ApiError(error.status, message, param=param or None, code=error.code, headers=error.headers)


def _template_messages(turns: Sequence[MessageTurn], text: ModelText) -> list[dict[str, Any]]:
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

    def prepare(self, work: RequestContext) -> PreparedChat:
        self.check(work.settings, work.model_name)
        try:
            return prepare_chat(work, self.to_conversation(work), self, max_tokens=self.max_tokens, logprobs=None)
        except ApiError as error:
            raise self.with_places(error) from None

    def stop_strings(self) -> tuple[str, Sequence[str]]:
        return "stop_sequences", self.stop_sequences or ()

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        if self.stop_sequences is not None:
            more["stop"] = self.stop_sequences
        return super().sampling(defaults, **more)

    def _format_request(self) -> GuideRequest | None:
        asked = None if self.output_config is None else self.output_config.format
        return None if asked is None else GuideRequest("output_config.format", "json_schema", asked.schema_)


class CountTokensRequest(MessagesInput):
    """Fields of `/v1/messages`, without those that only the answer depends on."""

    def prepare(self, work: RequestContext) -> bytes:
        """Return the answer's JSON."""
        check_model(self.model, work.model_name)
        try:
            rendered = render(work, self.to_conversation(work).conversation)
            count = len(token_ids_of(work, rendered, "messages"))
        except ApiError as error:
            raise self.with_places(error) from None
        return json.dumps({"input_tokens": count}).encode()
