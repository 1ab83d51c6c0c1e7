"""From a conversation to a prompt, and to what is known of its answer before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.errors import RequestError
from ostinato.serve.errors import ApiError
from ostinato.serve.model_text import ModelText, at_leisure
from ostinato.serve.parsing.formats import AnswerFormats, opens_reasoning
from ostinato.serve.parsing.tools import Tool, forced_tools, read_tools
from ostinato.serve.protocol.conversation import ConversationBody, template_kwargs
from ostinato.serve.protocol.messages import for_template


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool

    @property
    def size(self) -> int:
        """Characters, about."""
        texts = (text for message in self.messages for text in message.values() if isinstance(text, str))
        return sum(map(len, texts)) + (len(str(self.tools)) if self.tools else 0)


@dataclass(frozen=True)
class AnswerForm:
    """What an answer may consist of."""

    formats: AnswerFormats
    tools: tuple[Tool, ...]
    """Those that it may call."""
    starts_in_reasoning: bool
    parallel: bool
    """Whether it may call several."""

    @property
    def is_plain(self) -> bool:
        """Whether all of it is content, so that nothing need be looked for."""
        return self.formats.reasoning is None and not self.tools


def conversation_of(text: ModelText, body: ConversationBody, tools: Sequence[Tool]) -> Conversation:
    """What a body says of its prompt; `tools` are those that the model is told of."""
    continues = body.continue_final_message is True
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(
        for_template(body.messages, text.knows_developer),
        [described(tool) for tool in tools] or None,
        template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
        adds,
        continues,
    )


def described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


async def render(text: ModelText, conversation: Conversation, param: str = "messages") -> str:
    """The prompt, special tokens included. ApiError, which names `param`, if the template refuses."""

    def work() -> str:
        return text.chat_template.render(
            conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.kwargs,
        )

    try:
        return await at_leisure(conversation.size, work)
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None


def answer_form(
    text: ModelText, conversation: Conversation, prompt: str, tools: tuple[Tool, ...], parallel: bool
) -> AnswerForm:
    """What the answer to `prompt`, which was rendered from `conversation`, may consist of."""
    formats = text.formats
    inside = opens_reasoning(prompt, formats)
    if conversation.continue_final_message and formats.reasoning is not None:
        last = str(conversation.messages[-1]["content"])
        inside = last.rfind(formats.reasoning.begin) > last.rfind(formats.reasoning.end)
    return AnswerForm(formats, tools, inside, parallel)


def checked_tools(text: ModelText, tools: Any, tool_choice: Any, nested: bool = True) -> tuple[Tool, ...]:
    """The tools that an answer may call: none if the choice is `none`. ApiError for what is wrong with them.

    `nested`: whether the request had them as `read_tools` takes them, and not the function's fields beside its type.
    """
    try:
        read = read_tools(tools)
    except RequestError as error:
        message = error.message if nested else error.message.replace(".function", "")
        raise ApiError(400, message, param="tools") from None
    try:
        forced_tools(read, tool_choice)
    except RequestError as error:
        raise ApiError(400, error.message, param="tool_choice") from None
    if tool_choice == "none":
        return ()
    if read and not text.takes_tools:
        raise ApiError(400, "this model's chat template takes no tools; leave them out", param="tools")
    if read and text.formats.tools is None:
        known = "Hermes and Qwen, Qwen3-Coder and Nemotron 3, Nemotron-H"
        message = f"this model's chat template shows none of the forms of tool calls that are read: {known}"
        raise ApiError(400, message, param="tools")
    return read
