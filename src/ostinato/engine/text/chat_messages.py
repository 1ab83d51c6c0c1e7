"""Messages of a conversation before a chat template gets them: what is in one that no template would read is refused.

A template ignores keys that it does not know, and writes Python's form of a content that it expects as text. Keys,
roles and types of parts are those of this module, and those that the template itself names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args

from pydantic_core import from_json

from ostinato.errors import RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.media.message_media import MEDIA_KEYS, TEXT_TYPES

ChatMessage = JsonMapping
Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Roles of messages. A template may name further ones."""
TEMPLATE_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Keys of messages, beside role, content and tool_calls, that templates get as they are."""
MESSAGE_KEYS = ("role", "content", "tool_calls", *TEMPLATE_KEYS)
ECHOED_KEYS = ("annotations", "provider_specific_fields")
"""Keys of answers that clients send back with them, which change nothing."""
_CALL_KEYS = ("id", "type", "function", "index", "provider_specific_fields")
_FUNCTION_KEYS = ("name", "arguments")
_SAY_SOMETHING = frozenset({"system", "developer", "user", "tool"})
"""Roles whose messages need content. An assistant's may be tool calls alone."""
_AND_NAMED = "and those that the chat template names"


def checked_messages(messages: Sequence[ChatMessage], template: str) -> list[JsonObject]:
    """Return copies of messages for a template. RequestError for a form, key or part that it would not read."""
    if isinstance(messages, (str, bytes, Mapping)) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError('messages must be a list of objects such as {"role": "user", "content": "Hello"}')
    if not messages:
        raise RequestError("a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} has no role, such as system, user or assistant")
        _check_keys(f"message {index}", message, (*MESSAGE_KEYS, *ECHOED_KEYS), template)
        if message["role"] in _SAY_SOMETHING and message.get("content") is None:
            raise RequestError(f"message {index}, of the {message['role']}, has no content")
        _check_content(f"message {index}", message, template)
        _check_calls(f"message {index}", message, template)
    copies = [_with_objects(plain(message), f"message {index}") for index, message in enumerate(messages)]
    reads = next((key for key in ("reasoning_content", "reasoning", "thinking") if _names(template, key)), None)
    copies = [_with_reasoning(message, f"message {index}", reads) for index, message in enumerate(copies)]
    return copies if "developer" in template else [_as_system(message) for message in copies]


def check_rendered(messages: Sequence[ChatMessage], template: str, text: str) -> None:
    """Raise RequestError for a role that a template did not refuse and does not know, and for Python's form of content.

    `text` is the prompt that it made of `messages`.
    """
    for index, message in enumerate(messages):
        # Some templates have roles of their own, such as Llama 3's ipython.
        role, content = message["role"], message.get("content")
        if role not in get_args(Role) and not _names(template, role):
            known = f"{', '.join(get_args(Role))}, and those that the chat template names"
            raise RequestError(
                f"message {index} has the role {role!r}{_meant(role, get_args(Role))}; roles are {known}"
            )
        written = str(content) if isinstance(content, list | dict) else ""
        if written in text and written != (json.dumps(content) if written else ""):
            raise RequestError(f"this model's chat template takes text alone, and message {index} has other content")


def _check_keys(where: str, value: Mapping[str, object], known: Collection[str], template: str) -> None:
    """Raise RequestError for a key that is not known and that the template does not name; null is none."""
    for key in value:
        if key in known or value[key] is None or _names(template, str(key)):
            continue
        listed = ", ".join(name for name in known if name not in ECHOED_KEYS)
        hint = "; images are parts of content" if key == "images" else _meant(str(key), known)
        raise RequestError(f"{where} has the key {str(key)[:100]!r}{hint}; keys are {listed}, {_AND_NAMED}")


def _check_content(where: str, message: ChatMessage, template: str) -> None:
    """Raise RequestError for content of a form that no template reads, most without a word."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else (None,)
    has_parts = all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts)
    # A tool may answer with a value, which some templates print as JSON.
    if not (has_parts or content is None or isinstance(content, str) or message["role"] == "tool"):
        form = 'text, or a list of parts such as {"type": "text", "text": ...}'
        raise RequestError(f"{where} has {type(content).__name__} for content; it should be {form}")
    known = (*TEXT_TYPES, *MEDIA_KEYS)
    for place, part in enumerate(parts if has_parts else ()):
        kind = part["type"]
        if kind not in known and not _names(template, kind):
            has = f"{where} has the type {kind[:100]!r} in content[{place}]{_meant(kind, known)}"
            raise RequestError(f"{has}; types of parts are {', '.join(known)}, {_AND_NAMED}")


def _check_calls(where: str, message: ChatMessage, template: str) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
        form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise RequestError(f"{where} has tool_calls that are no list of calls such as {form}")
    if calls and message["role"] in _SAY_SOMETHING:
        raise RequestError(f"{where}, of the {message['role']}, has tool_calls, which only an assistant's may have")
    for place, call in enumerate(calls):
        path, function = f"{where}, in tool_calls[{place}],", call.get("function", call)
        # A call may also be its function, without an object around it.
        _check_keys(path, call, _CALL_KEYS if function is not call else (*_CALL_KEYS, *_FUNCTION_KEYS), template)
        if function is not call:
            _check_keys(f"{path[:-1]}.function,", function, _FUNCTION_KEYS, template)


def _is_call(value: object) -> bool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def read_arguments(arguments: object) -> JsonObject | None:
    """Return a call's arguments, an object or the text of one; None for others.

    A call that max_tokens cut off comes back as it was sent: its whole parts are kept.
    """
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}", allow_partial="trailing-strings")
        except (ValueError, TypeError):  # TypeError: half of a surrogate pair
            return None
    return arguments if isinstance(arguments, dict) else None


def _with_objects(message: JsonObject, where: str) -> JsonObject:
    """Return a message whose calls have objects as arguments: templates would write a text as a string of JSON."""
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        if (given := function.get("arguments")) is not None:
            function["arguments"] = read_arguments(given)
            if function["arguments"] is None:
                raise RequestError(f"{where}, in tool_calls[{place}], has arguments that are no JSON object")
    return message


def _with_reasoning(message: JsonObject, where: str, key: str | None) -> JsonObject:
    """Return a message with its reasoning as `key`, the name by which its template reads it; None: it does not.

    gpt-oss's template, which reads `thinking`, refuses that together with content in a message with calls.
    """
    content, other = (message.get(name) for name in ("reasoning_content", "reasoning"))
    if content and other and content != other:
        raise RequestError(f"{where} has reasoning_content and another reasoning: these are names of the same")
    if not (content or other) or (key == "thinking" and message.get("tool_calls") and message.get("content")):
        return message
    rest = {name: value for name, value in message.items() if name not in ("reasoning_content", "reasoning")}
    return rest if key is None else {key: content or other, **rest}


def _names(template: str, word: str) -> bool:
    """Return whether a template has the word as a text, or as an attribute."""
    if not word or word not in template:
        return False
    escaped = re.escape(word)
    return re.search(rf"'{escaped}'|\"{escaped}\"|\.{escaped}\b", template) is not None


def _meant(word: str, known: Collection[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _as_system(message: JsonObject) -> JsonObject:
    """Return a developer's message as a system's, for a template that does not know developers."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def plain(value: object) -> Any:
    """Return a copy in plain JSON types, so that a template meets no object whose methods have effects."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    try:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
    except RecursionError:
        raise RequestError("a value for the chat template is nested too deeply, or holds itself") from None
    raise RequestError(f"chat templates are given strings, numbers, lists and objects, not a {type(value).__name__}")
