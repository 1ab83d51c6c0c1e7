"""What makes a prompt of a conversation: `/v1/chat/completions` and `/tokenize` take these fields."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ostinato.serve.http.errors import ApiError
from ostinato.serve.protocol.common import MAX_MESSAGES, Body, Several
from ostinato.serve.protocol.messages import Message

_OWN = frozenset({"messages", "tools", "documents", "template_name", "add_generation_prompt", "continue_final_message"})


class ConversationBody(Body):
    messages: Several[Message] = Field(max_length=MAX_MESSAGES)
    """The conversation so far."""
    tools: Several[dict[str, Any]] | None = None
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as enable_thinking."""
    reasoning_effort: str | None = None
    """A variable of the chat template; `none` also sets its enable_thinking to false."""
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an answer (true, unless continue_final_message is)."""
    continue_final_message: bool | None = None
    """Go on inside the last message."""


def template_kwargs(given: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """The variables of the template. ApiError if they take the place of others."""
    kwargs = dict(given or {})
    for name in kwargs.keys() & _OWN:
        path = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"{path} is no variable to be set there; give {name} beside it", param=path)
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs
