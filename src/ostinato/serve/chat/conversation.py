"""From a conversation to a prompt, and to what is known of its answer before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.errors import RequestError
from ostinato.media.input import RenderedChat, render_chat
from ostinato.media.messages import MediaError
from ostinato.observe.record import RequestRecord
from ostinato.sample.params import SamplingParams
from ostinato.serve.chat.answers import Run
from ostinato.serve.chat.guides import answer_guide
from ostinato.serve.chat.model_text import ModelText, at_leisure
from ostinato.serve.http.errors import ApiError
from ostinato.serve.parsing.formats import AnswerFormats, opens_reasoning
from ostinato.serve.parsing.tools import Tool, forced_tools, read_tools
from ostinato.serve.protocol.common import Generating
from ostinato.serve.protocol.conversation import ConversationBody, template_kwargs
from ostinato.serve.protocol.guides import Wish
from ostinato.serve.protocol.messages import for_template


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    places: Sequence[str] | None = None
    """Where the messages stood in the request; None: `messages[0]` and so on."""

    @property
    def has_images(self) -> bool:
        return any(isinstance(message.get("content"), list) for message in self.messages)

    @property
    def size(self) -> int:
        """Characters, about, images aside."""
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
    either: bool
    """Whether it has calls or content, and never both."""

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


async def render(text: ModelText, conversation: Conversation, param: str = "messages") -> RenderedChat:
    """The prompt, special tokens included, with its images. ApiError, which names `param`, if the template refuses, or
    the image that cannot be taken."""

    def of_template(messages: Sequence[Mapping[str, Any]]) -> str:
        return text.chat_template.render(
            messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.kwargs,
        )

    def work() -> RenderedChat:
        others = (conversation.tools, conversation.kwargs)
        return render_chat(conversation.messages, of_template, text.media, others, conversation.places)

    try:
        if conversation.has_images and text.media is not None:
            return await text.seeing.run(work)
        return await at_leisure(conversation.size, work)
    except MediaError as error:
        raise ApiError(400, error.message, param=error.where) from None
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None


async def token_ids_of(
    text: ModelText, rendered: RenderedChat, param: str, add_special_tokens: bool = False
) -> list[int]:
    """Those of a conversation's prompt. ApiError, which names `param`, if there are none or too many."""
    if rendered.media is not None:
        return rendered.media.token_ids
    return await text.encode(rendered.text, add_special_tokens, param)


@dataclass(frozen=True)
class Asked:
    """What a request says of its answer: `wish` is for its form, `param` the field that the conversation came in."""

    conversation: Conversation
    tools: tuple[Tool, ...]
    tool_choice: Any
    parallel: bool
    wish: Wish | None
    param: str


async def begin(
    engine: AsyncEngine,
    text: ModelText,
    asked: Asked,
    params: SamplingParams,
    body: Generating,
    deadline: float,
    record: RequestRecord,
) -> tuple[Run, AnswerForm]:
    """Has the engine answer a conversation, for the request of `record`; also tells what the answer may consist of."""
    rendered = await render(text, asked.conversation, asked.param)
    token_ids = await token_ids_of(text, rendered, asked.param)
    form = answer_form(text, asked, rendered.text)
    guide = await answer_guide(text, form, asked.wish, asked.tool_choice)
    return await Run.begin(engine, [token_ids], params, body, deadline, record, guide, rendered.media), form


def answer_form(text: ModelText, asked: Asked, prompt: str) -> AnswerForm:
    """What the answer to `prompt`, which was rendered from the conversation that is asked about, may consist of."""
    formats, conversation = text.formats, asked.conversation
    inside = opens_reasoning(prompt, formats)
    if conversation.continue_final_message and formats.reasoning is not None:
        last = str(conversation.messages[-1]["content"])
        inside = last.rfind(formats.reasoning.begin) > last.rfind(formats.reasoning.end)
    return AnswerForm(formats, asked.tools, inside, asked.parallel, either=asked.wish is not None)


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
