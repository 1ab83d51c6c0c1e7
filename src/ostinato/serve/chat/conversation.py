"""Conversion of a conversation to a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ostinato.engine.text.chat_template import ChatTemplate, TemplateTooExpensive
from ostinato.errors import RequestError
from ostinato.media.input import RenderedChat, render_chat
from ostinato.media.messages import MediaError
from ostinato.serve.chat.calls.forms import known_forms
from ostinato.serve.chat.formats import AnswerFormats, opens_reasoning
from ostinato.serve.chat.messages import Message, for_template
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.chat.tools import Tool, forced_tools, read_choice, read_tools
from ostinato.serve.http.bodies import Body, ListOf
from ostinato.serve.http.errors import ApiError
from ostinato.serve.settings import ServeSettings
from ostinato.serve.work.context import RequestContext

_OWN = frozenset(inspect.signature(ChatTemplate.render).parameters) - {"chat_template_kwargs"}
"""Arguments of the rendering itself, which a request cannot set as variables of the template."""


class ConversationBody(Body):
    """The fields that make a prompt: `/v1/chat/completions` and `/tokenize` take them."""

    messages: ListOf[Message]
    """The conversation so far."""
    tools: ListOf[dict[str, Any]] | None = None
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """A variable of the chat template; `none` also sets its enable_thinking to false."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template."""
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an answer (default: true, unless continue_final_message is)."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""


@dataclass(frozen=True)
class Conversation:
    """Arguments of a chat template."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    places: Sequence[str] | None = None
    """Place of each message in the body; None: `messages[0]` and so on."""

    @property
    def has_images(self) -> bool:
        return any(isinstance(message.get("content"), list) for message in self.messages)


def conversation_of(text: ModelText, body: ConversationBody, tools: Sequence[Tool]) -> Conversation:
    """Return the conversation in a body; the prompt describes `tools`."""
    continues = body.continue_final_message is True
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(
        for_template(body.messages, text.knows_developer),
        described(tools),
        template_kwargs(body.chat_template_kwargs, body.reasoning_effort, body.verbosity),
        adds,
        continues,
    )


def described(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Return tools in the form for chat templates."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ] or None


def template_kwargs(
    given: dict[str, Any] | None, reasoning_effort: str | None, verbosity: str | None = None
) -> dict[str, Any]:
    """Return the variables of the template. ApiError if one of them has a separate field."""
    kwargs = dict(given or {})
    for name in kwargs.keys() & _OWN:
        path = f"chat_template_kwargs.{name}"
        instead = f"; give {name} beside it" if name in ConversationBody.model_fields else ""
        raise ApiError(400, f"{path} cannot be set there{instead}", param=path)
    if verbosity is not None:
        kwargs.setdefault("verbosity", verbosity)
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


def check_counts(
    messages: Sequence[Any], tools: Any, settings: ServeSettings, param: str = "messages", num_parts: int | None = None
) -> None:
    """Raise ApiError for more messages, parts of messages or tools than a request may have.

    `messages` have a `content`; `num_parts` is the number of its parts if they are nested deeper.
    """
    parts = num_parts
    if parts is None:
        parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    for field, what, count, setting in (
        (param, "messages", len(messages), "max_messages"),
        (param, "parts of messages", parts, "max_parts"),
        ("tools", "tools", len(tools or ()), "max_tools"),
    ):
        most = getattr(settings, setting)
        if count > most:
            message = f"{field}: {count} {what} are given, and a request may have {most} ({setting})"
            raise ApiError(400, message, param=field)


def render(work: RequestContext, conversation: Conversation, param: str = "messages") -> RenderedChat:
    """Render the prompt, special tokens included, with its images.

    Raises ApiError, which names `param` if the template refuses the conversation, and an image that cannot be used;
    TooHeavy on the event loop for what takes long, as images do.
    """
    text = work.text
    if conversation.has_images and text.media is not None:
        work.require_worker()

    def of_template(messages: Sequence[Mapping[str, Any]]) -> str:
        if text.formats.has_channels:
            messages = [_with_thinking(message) for message in messages]
        return text.chat_template.render(
            messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            budget=work.budget,
            **conversation.kwargs,
        )

    others = (conversation.tools, conversation.kwargs)
    try:
        return render_chat(conversation.messages, of_template, text.media, others, conversation.places)
    except TemplateTooExpensive as error:
        work.require_worker()
        raise ApiError(400, error.message, param=param) from None
    except MediaError as error:
        raise ApiError(400, error.message, param=error.where) from None
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as gpt-oss's template takes it: with its reasoning as `thinking`.

    The template refuses that together with content in a message with calls.
    """
    if not message.get("reasoning_content") or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": message["reasoning_content"]}


def token_ids_of(work: RequestContext, rendered: RenderedChat, param: str, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a rendered prompt. ApiError, which names `param`, if there are none or too many."""
    if rendered.media is not None:
        return rendered.media.token_ids
    return work.encode(rendered.text, add_special_tokens, param)


def starts_in_reasoning(formats: AnswerFormats, conversation: Conversation, prompt: str) -> bool:
    """Return whether the answer to `prompt` begins inside reasoning; the prompt is rendered from the conversation."""
    if not conversation.continue_final_message or formats.reasoning is None:
        return opens_reasoning(prompt, formats)
    last = str(conversation.messages[-1]["content"])
    return last.rfind(formats.reasoning.begin) > last.rfind(formats.reasoning.end)


@dataclass(frozen=True)
class Tools:
    """The tools of a request."""

    offered_tools: tuple[Tool, ...] = ()
    """Tools that the prompt describes."""
    callable: tuple[Tool, ...] = ()
    """Tools that an answer may call."""
    choice: Any = None
    """The choice among them."""


def checked_tools(text: ModelText, tools: Any, tool_choice: Any, nested: bool = True) -> Tools:
    """Return the tools of a request: none if the choice is `none`. ApiError if something in them is wrong.

    `nested`: whether the body holds each function in a field `function`, as `read_tools` takes it, or its fields
    together with the type.
    """
    try:
        read = read_tools(tools)
    except RequestError as error:
        message = error.message if nested else error.message.replace(".function", "")
        raise ApiError(400, message, param="tools") from None
    try:
        may_call, choice = read_choice(read, tool_choice)
        forced_tools(may_call, choice)
    except RequestError as error:
        raise ApiError(400, error.message, param="tool_choice") from None
    if choice == "none":
        return Tools(choice=choice)
    if read and not text.takes_tools:
        raise ApiError(400, "this model's chat template takes no tools; leave them out", param="tools")
    if read and text.formats.tools is None:
        message = f"this model's chat template shows none of the known forms of tool calls: {known_forms()}"
        raise ApiError(400, message, param="tools")
    return Tools(read, may_call, choice)
