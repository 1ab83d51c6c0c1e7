"""Messages of a conversation: their form in bodies, their form for chat templates, and the prompt made of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from ostinato.engine.text.chat_marks import ChatMark
from ostinato.engine.text.chat_messages import TEMPLATE_KEYS, Role, read_arguments
from ostinato.engine.text.chat_template import ChatTemplate, TemplateTooExpensive
from ostinato.errors import MediaError, RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.media.media_input import RenderedChat, render_chat
from ostinato.media.message_media import TEXT_KEYS, TEXT_TYPES, UnknownMember
from ostinato.sampling.params import SamplingParams
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.answer_formats import AnswerFormats, opens_reasoning
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.chat.tool_calls.formats import EQUATION, GENERIC, EquationSyntax, form_problem
from ostinato.serve.chat.tools import CHAT_SPELLING, Tool, ToolSpelling, forced_tools, read_choice, read_tools, spelled
from ostinato.serve.http.api_errors import ApiError, check_count, field_error
from ostinato.serve.http.json_bodies import Body, EchoedBody, Ignored, ListOf, unsupported_field
from ostinato.serve.http.unknown_fields import UNKNOWN, check_members
from ostinato.serve.settings import ServeSettings

_MEDIA = ("image_url", "input_image", "video")


class FunctionCall(EchoedBody):
    name: str
    arguments: str | JsonObject
    """A JSON object, or its text, which may be cut off."""


class ToolCall(EchoedBody):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None
    provider_specific_fields: Ignored = None
    """Field of LiteLLM, as in `Message`."""


class Message(EchoedBody):
    role: Role
    content: str | ListOf[JsonObject] | None = None
    """Text, or a list of parts.

    Parts are `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}` and `{"type": "video",
    "video": [URLs of frames], "fps": ...}`. If all parts are text, the template gets them as one text, joined with
    newlines.
    """
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    """Calls of an assistant."""
    tool_call_id: str | None = None
    """Id of the call that a tool's answer belongs to."""
    reasoning_content: str | None = None
    """Reasoning of an assistant. The template decides how it is used; many leave it out."""
    reasoning: str | None = None
    """Another name of reasoning_content, by which vLLM and others answer."""
    refusal: Annotated[None, unsupported_field("give the message's text as content")] = None
    function_call: Annotated[None, unsupported_field("use tool_calls")] = None
    audio: Annotated[None, unsupported_field("only text is")] = None
    annotations: Ignored = None
    provider_specific_fields: Ignored = None
    """Field that LiteLLM adds to an answer, and sends back with it."""


def for_template(messages: Sequence[Message], knows_developer: bool) -> list[JsonObject]:
    """Convert messages to the form that Hugging Face's chat templates take.

    Content is one text, or parts if there are images; arguments of calls are objects. `developer` becomes `system` for
    a template that does not know it. ApiError, which names the field, for content that is neither text nor an image.
    """
    return [one_for_template(message, f"messages[{place}]", knows_developer) for place, message in enumerate(messages)]


def one_for_template(message: Message, where: str, knows_developer: bool) -> JsonObject:
    """Convert one message, as `for_template` does; `where` is its place in the request."""
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, "only an assistant's message has tool_calls", param=f"{where}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"{where} has no content", param=f"{where}.content")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    made: JsonObject = {"role": role, "content": _content(message.content or "", f"{where}.content")}
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)
        ]
    for field in TEMPLATE_KEYS:
        if (value := getattr(message, field)) is not None:
            made[field] = value
    return made


def text_of(content: str | list[JsonObject], where: str) -> str:
    """Return the text of a message's content, or of the parts of one."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _content(content: str | list[JsonObject], where: str) -> str | list[JsonObject]:
    """Return the text of a message's content, or its parts if there are images."""
    if isinstance(content, str) or not any(part.get("type") in _MEDIA for part in content):
        return text_of(content, where)
    return [
        _media(part, f"{where}[{place}]")
        if part.get("type") in _MEDIA
        else {"type": "text", "text": _part(part, f"{where}[{place}]")}
        for place, part in enumerate(content)
    ]


def _media(part: JsonObject, where: str) -> JsonObject:
    """Return an image or video in the form of `ostinato.media`, which checks it."""
    if part["type"] != "input_image":
        return part
    if part.get("file_id") is not None:
        raise ApiError(400, "files are not stored; give the image as image_url", param=f"{where}.file_id")
    return {"type": "image_url"} | {key: value for key, value in part.items() if key not in ("type", "file_id")}


def _part(part: JsonObject, where: str) -> str:
    kind = part.get("type")
    if kind not in TEXT_TYPES:
        raise field_error(f"{where}.type", "should be text, or that of an image: no other content is served")
    check_members(part, TEXT_KEYS, where)
    text = part.get("text")
    if not isinstance(text, str):
        raise field_error(f"{where}.text", "should be a string")
    return text


def _call(call: ToolCall, where: str) -> JsonObject:
    arguments = read_arguments(call.function.arguments)
    if arguments is None:
        raise field_error(f"{where}.function.arguments", "should be the text of a JSON object")
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


_OWN = frozenset(inspect.signature(ChatTemplate.render).parameters) - {"chat_template_kwargs"}
"""Arguments of the rendering itself, which a request cannot set as variables of the template."""


class ConversationBody(Body):
    """The fields that make a prompt: `/v1/chat/completions` and `/tokenize` take them."""

    messages: ListOf[Message]
    """The conversation so far."""
    tools: ListOf[JsonObject] | None = None
    """Functions that the model may call."""
    chat_template_kwargs: JsonObject | None = None
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

    messages: Sequence[JsonObject]
    tools: Sequence[JsonMapping] | None
    kwargs: JsonObject
    add_generation_prompt: bool
    continue_final_message: bool
    places: Sequence[str] | None = None
    """Place of each message in the body; None: `messages[0]` and so on."""
    marks: Sequence[ChatMark] = ()
    """Positions at which the client wants checkpoints."""

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
        template_kwargs(text, body.chat_template_kwargs, body.reasoning_effort, body.verbosity, tools=tools),
        adds,
        continues,
    )


def described(tools: Sequence[Tool]) -> list[JsonObject] | None:
    """Return tools in the form for chat templates."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ] or None


def template_kwargs(
    text: ModelText,
    given: JsonObject | None,
    reasoning_effort: str | None,
    verbosity: str | None = None,
    *,
    thinks: bool | None = None,
    tools: Sequence[Tool],
    effort_field: str = "reasoning_effort",
    think_field: str = "thinking",
) -> JsonObject:
    """Return the variables of the template. ApiError for one that has a separate field, or that it does not use.

    `effort_field` and `think_field` are the API's names for reasoning effort and thinking. Effort `none` and no
    thinking are what a model without thinking does; one that always thinks refuses them.
    """
    kwargs = dict(given or {})
    for name in kwargs.keys() & _OWN:
        path = f"chat_template_kwargs.{name}"
        instead = f"; give {name} beside it" if name in ConversationBody.model_fields else ""
        raise field_error(path, f"cannot be set there{instead}")
    try:
        text.chat_template.check_variables(kwargs, tools)
    except RequestError as error:
        beside = f"; give {error.setting} beside chat_template_kwargs" * (error.setting in SamplingParams.model_fields)
        param = f"chat_template_kwargs.{error.setting}" if error.setting else "chat_template_kwargs"
        raise ApiError(400, f"{error.message}{beside}", param=param, code=UNKNOWN) from None
    variables: dict[str, tuple[str, object]] = {"verbosity": ("verbosity", verbosity)}
    if reasoning_effort != "none":
        variables["reasoning_effort"] = effort_field, reasoning_effort
    if thinks is not None and thinks is (text.formats.reasoning is None):
        variables["enable_thinking"] = think_field, thinks
    if thinks is None and reasoning_effort == "none" and text.formats.reasoning is not None:
        reads_effort = _problem_with(text, "reasoning_effort", tools) is None
        variables["reasoning_effort" if reads_effort else "enable_thinking"] = effort_field, reasoning_effort
    for name, (field, value) in variables.items():
        if value is not None:
            _check_variable(text, name, field, tools)
    more = {"enable_thinking": thinks, "verbosity": verbosity, "reasoning_effort": reasoning_effort}
    if reasoning_effort == "none":
        more["enable_thinking"] = False if thinks is None else thinks
    return {**{name: value for name, value in more.items() if value is not None}, **kwargs}


def _check_variable(text: ModelText, name: str, field: str, tools: Sequence[Tool]) -> None:
    """Raise ApiError if a field sets a variable that the template does not use."""
    problem = _problem_with(text, name, tools)
    if problem is not None:
        message = problem if name == field else f"{field} sets {name}, and {problem}"
        raise ApiError(400, f"{message}; leave it out", param=field, code=UNKNOWN)


def _problem_with(text: ModelText, name: str, tools: Sequence[Tool]) -> str | None:
    """Return why a variable cannot be set; None if the template uses it."""
    try:
        text.chat_template.check_variables([name], tools)
    except RequestError as error:
        return error.message
    return None


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
        check_count(field, what, count, getattr(settings, setting), setting)


def render(context: RequestContext, conversation: Conversation, param: str = "messages") -> RenderedChat:
    """Render the prompt, special tokens included, with its images.

    Raises ApiError, which names `param` if the template refuses the conversation, and an image that cannot be used;
    NeedsWorker on the event loop for what takes long, as images do.
    """
    text = context.text
    if conversation.has_images and text.media is not None:
        context.require_worker()

    def apply_template(messages: Sequence[Mapping[str, object]]) -> str:
        return render_text(context, conversation, messages, param)

    others = (conversation.tools, conversation.kwargs)
    try:
        return render_chat(conversation.messages, apply_template, text.media, others, conversation.places)
    except MediaError as error:
        code = UNKNOWN if isinstance(error, UnknownMember) else None
        raise ApiError(400, error.message, param=error.setting, code=code) from None
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None


def render_text(
    context: RequestContext, conversation: Conversation, messages: Sequence[JsonMapping], param: str = "messages"
) -> str:
    """Return what the chat template makes of a conversation whose images are placeholders in `messages`.

    Raises ApiError, which names `param`, if the template refuses; NeedsWorker on the event loop for what takes long.
    """
    text, tools = context.text, conversation.tools
    if text.formats.tools == GENERIC:
        messages = generic_messages(messages)
    if tools and not text.describes_tools:
        if text.formats_with(read_tools(tools)).tools != EQUATION:
            messages = _with_tools(messages, tools, text.renders_system)
        tools = None
    rendered = partial(
        text.chat_template.render,
        messages,
        tools=tools,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        **conversation.kwargs,
    )
    try:
        return context.run_template(rendered, (messages, tools, conversation.kwargs))
    except TemplateTooExpensive as error:
        context.require_worker()
        raise ApiError(400, error.message, param=param) from None
    except RequestError as error:
        raise ApiError(400, error.message, param=param) from None


def _with_tools(
    messages: Sequence[JsonMapping], tools: Sequence[JsonMapping], renders_system: bool
) -> list[JsonMapping]:
    """Return messages whose first one describes tools, for a template that does not.

    It is the system's, or the user's if the template has no place for a system message.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = f'{_TOOLS_TEXT}\n{listed}\n\n<tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>\n\n'
    if not messages or messages[0]["role"] not in ("system", "user")[: 1 if renders_system else 2]:
        return [{"role": "system", "content": told.strip()}, *messages]
    first, *others = messages
    content = first["content"]
    content = told + content if isinstance(content, str) else [{"type": "text", "text": told}, *content]
    return [{**first, "content": content}, *others]


def generic_messages(messages: Sequence[JsonMapping]) -> list[JsonMapping]:
    """Return messages whose calls are text of the form `GENERIC`, and whose results are the user's, for any template.

    Results in a row, and a question right after them, are one message: many templates want user and assistant in turns.
    """
    made: list[JsonMapping] = []
    follows_result = False
    for message in messages:
        calls, content = message.get("tool_calls") or (), message.get("content") or ""
        if calls:
            written = [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
            ]
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**plain, "content": _joined(content, "\n".join(written))}
        is_result = message["role"] == "tool"
        if is_result:
            content = _joined("<tool_response>", _joined(content, "</tool_response>"))
            message = {"role": "user", "content": content}
        if message["role"] == "user" and made and made[-1].get("role") == "user" and follows_result:
            made[-1] = {**made[-1], "content": _joined(made[-1]["content"], content)}
        else:
            made.append(message)
        follows_result = is_result
    return made


def _joined(first: str | list[JsonObject], second: str | list[JsonObject]) -> str | list[JsonObject]:
    """Return two contents of messages as one, with a newline between texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}" if first and second else first or second
    parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second) if one)
    return [part for one in parts for part in one]


_TOOLS_TEXT = "Answer with calls of these functions, in the form that follows them:"


def token_ids_of(
    context: RequestContext, rendered: RenderedChat, param: str, add_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of a rendered prompt. ApiError, which names `param`, if there are none or too many."""
    if rendered.media is not None:
        return rendered.media.token_ids
    return context.encode(rendered.text, add_special_tokens, param)


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


def checked_tools(text: ModelText, tools: object, tool_choice: object, spelling: ToolSpelling = CHAT_SPELLING) -> Tools:
    """Return the tools of a request: none if the choice is `none`. ApiError if something in them is wrong.

    Tools and choice are in the form of chat completions; errors name the fields by the `spelling` of the API.
    """
    try:
        read = read_tools(tools)
    except RequestError as error:
        message, place = spelled(error.message, spelling), spelled(error.setting or "", spelling)
        raise ApiError(400, message, param=place or "tools", code=UNKNOWN if place else None) from None
    read = tuple(replace(tool, place=spelled(tool.place, spelling)) for tool in read)
    try:
        may_call, choice = read_choice(read, tool_choice)
        forced_tools(may_call, choice)
    except RequestError as error:
        raise ApiError(400, spelled(error.message, spelling), param="tool_choice") from None
    if choice == "none":
        return Tools(choice=choice)
    if read and forced_tools(may_call, choice):
        return Tools(read, may_call, choice)
    form = text.formats.tools
    if read and not (text.takes_tools or text.describes_tools):
        message = (
            'this model\'s chat template takes no tools; leave them out, demand a call by tool_choice "required", or '
            "start the server with --tool-call-parser generic, which describes them in the system message"
        )
        raise ApiError(400, spelled(message, spelling), param="tools")
    if form is not None and isinstance(form.syntax, EquationSyntax) and may_call and not form.can_call(may_call):
        message = (
            f"this model calls one tool, whose only required parameter is a text named {form.syntax.parameter}; leave "
            'out others, demand a call by tool_choice "required", or start the server with --tool-call-parser generic, '
            "which describes any tools to the model"
        )
        raise ApiError(400, spelled(message, spelling), param="tools")
    if read and form is None:
        message = (
            f"this model's chat template {form_problem(text.chat_template.text)}; name one, or generic, by "
            'tool_call_parser when you start the server, or demand a call by tool_choice "required"'
        )
        raise ApiError(400, spelled(message, spelling), param="tools")
    return Tools(read, may_call, choice)
