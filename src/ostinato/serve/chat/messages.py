"""The messages of a conversation: their form in bodies, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic_core import from_json

from ostinato.serve.http.bodies import EchoedBody, Ignored, ListOf, unsupported_field
from ostinato.serve.http.errors import ApiError

Role = Literal["system", "developer", "user", "assistant", "tool"]
_MEDIA = ("image_url", "input_image", "video")


class FunctionCall(EchoedBody):
    name: str
    arguments: str | dict[str, Any]
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
    content: str | ListOf[dict[str, Any]] | None = None
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
    """Reasoning of an assistant. The template decides how it is used."""
    refusal: Annotated[None, unsupported_field("give the message's text as content")] = None
    function_call: Annotated[None, unsupported_field("use tool_calls")] = None
    audio: Annotated[None, unsupported_field("only text is")] = None
    annotations: Ignored = None
    provider_specific_fields: Ignored = None
    """Field that LiteLLM adds to an answer, and sends back with it."""


def for_template(messages: Sequence[Message], knows_developer: bool) -> list[dict[str, Any]]:
    """Convert messages to the form that Hugging Face's chat templates take.

    Content is one text, or parts if there are images; arguments of calls are objects. `developer` becomes `system` for
    a template that does not know it. ApiError, which names the field, for content that is neither text nor an image.
    """
    return [one_for_template(message, f"messages[{place}]", knows_developer) for place, message in enumerate(messages)]


def one_for_template(message: Message, where: str, knows_developer: bool) -> dict[str, Any]:
    """Convert one message, as `for_template` does; `where` is its place in the request."""
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, "only an assistant's message has tool_calls", param=f"{where}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"{where} has no content", param=f"{where}.content")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message.content or "", f"{where}.content")}
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)
        ]
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            made[field] = value
    return made


def text_of(content: str | list[dict[str, Any]], where: str) -> str:
    """Return the text of a message's content, or of the parts of one."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _content(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    """Return the text of a message's content, or its parts if there are images."""
    if isinstance(content, str) or not any(part.get("type") in _MEDIA for part in content):
        return text_of(content, where)
    return [
        _media(part, f"{where}[{place}]")
        if part.get("type") in _MEDIA
        else {"type": "text", "text": _part(part, f"{where}[{place}]")}
        for place, part in enumerate(content)
    ]


def _media(part: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an image or video in the form of `ostinato.media`, which checks it."""
    if part["type"] != "input_image":
        return part
    if part.get("file_id") is not None:
        raise ApiError(400, "files are not stored; give the image as image_url", param=f"{where}.file_id")
    return {"type": "image_url"} | {key: value for key, value in part.items() if key not in ("type", "file_id")}


def _part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        message = f"{where}.type should be text, or that of an image: no other content is served"
        raise ApiError(400, message, param=f"{where}.type")
    for name in part:
        if name not in ("type", "text", "annotations", "logprobs"):
            path = f"{where}.{name}"
            raise ApiError(400, f"unknown parameter: {path}", param=path, code="unknown_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.text should be a string", param=f"{where}.text")
    return text


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            # A call that max_tokens cut off comes back as it was sent: its whole parts are kept.
            arguments = from_json(arguments or "{}", allow_partial="trailing-strings")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            path = f"{where}.function.arguments"
            raise ApiError(400, f"{path} should be the text of a JSON object", param=path)
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}
