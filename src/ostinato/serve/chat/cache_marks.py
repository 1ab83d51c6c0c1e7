"""Marks in the bodies of requests (`engine/text/chat_marks.py`), with errors in the clients' form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ostinato.engine.text import chat_marks
from ostinato.engine.text.chat_marks import ChatMark
from ostinato.engine.text.chat_messages import ChatMessage
from ostinato.errors import RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.kv_cache.marks import MAX_MARKS, Mark
from ostinato.media.media_input import RenderedChat
from ostinato.media.message_media import split_media
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.conversation import Conversation, render_text
from ostinato.serve.http.api_errors import ApiError, field_error
from ostinato.serve.http.unknown_fields import check_members


def read_cache_control(value: object, where: str) -> float | None:
    """Return the seconds that Anthropic's `cache_control` asks for; None without one. ApiError if it is not valid."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise field_error(where, 'should be {"type": "ephemeral"}, with an optional ttl of 5m or 1h')
    check_members(value, ("type", "ttl"), where)
    with _errors_of_fields():
        return chat_marks.read_ttl(value.get("ttl"), f"{where}.ttl")


def read_breakpoints(
    values: Sequence[int | JsonObject],
    roles: Sequence[str],
    num_tools: int,
    messages: Sequence[int | None],
    what: str = "messages",
) -> list[ChatMark]:
    """Return the marks of the field `cache_breakpoints` of a conversation; ApiError for what is not there."""
    with _errors_of_fields(values):
        return chat_marks.read_breakpoints(values, roles, num_tools, messages, what)


def read_positions(
    context: RequestContext,
    values: Sequence[int | JsonObject] | None,
    prompt: str | list[int],
    token_ids: Sequence[int],
) -> dict[str, Mark]:
    """Return the marks of `cache_breakpoints` in a prompt that is no conversation, by their places in the body.

    They are positions in the prompt, or `{"after": a position, "ttl": ...}`: characters of a text, or token ids; from
    the end if negative. ApiError, which names the entry, for what is not there.
    """
    marks, count = {}, len(prompt)
    with _errors_of_fields(values or ()):
        entries = list(chat_marks.read_entries(values or ()))
    for where, after, ttl in entries:
        if not chat_marks.is_integer(after) or not -count < after <= count or after == 0:
            unit = "characters" if isinstance(prompt, str) else "token ids"
            raise field_error(where, f"should be a number of {unit} from 1 to {count}, or from the end, such as -1")
        position = after % count or count
        if isinstance(prompt, str):
            position = chat_marks.token_position(context.encode(prompt[:position], True, where), token_ids)
        if not position:
            raise field_error(where, "cannot be located: the text up to it has other tokens than the prompt")
        marks[where] = Mark(position, ttl)
    return marks


def check_number(marks: Sequence[object], param: str) -> None:
    """Raise ApiError for more marks than a request may have."""
    with _errors_of_fields():
        chat_marks.check_number(marks, param)


@contextmanager
def _errors_of_fields(entries: Sequence[int | JsonObject] = ()) -> Iterator[None]:
    """Raise ApiError, which names the field, for unknown members of `entries` and for the RequestErrors inside."""
    for number, entry in enumerate(entries[:MAX_MARKS]):
        if isinstance(entry, dict):
            check_members(entry, chat_marks.MEMBERS, f"{chat_marks.FIELD}[{number}]")
    try:
        yield
    except RequestError as error:
        raise ApiError(400, error.message, param=error.setting) from None


def locate_marks(
    context: RequestContext, conversation: Conversation, rendered: RenderedChat, token_ids: Sequence[int]
) -> tuple[dict[str, Mark], list[str]]:
    """Return the conversation's marks {place in the body: at its token}, and the places that cannot be located."""
    return chat_marks.locate_marks(_BodyChat(context, conversation), conversation.marks, rendered.text, token_ids)


@dataclass(frozen=True)
class _BodyChat:
    """A conversation of a body (`ChatText`)."""

    context: RequestContext
    conversation: Conversation

    @property
    def messages(self) -> Sequence[ChatMessage]:
        return self.conversation.messages

    @property
    def tools(self) -> Sequence[JsonMapping] | None:
        return self.conversation.tools

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonMapping] | None, answered: bool
    ) -> str | None:
        changed = self.conversation if tools is self.tools else replace(self.conversation, tools=tools)
        if answered:
            changed = replace(changed, add_generation_prompt=False, continue_final_message=False)
        try:
            plain, _ = split_media(messages)
            return render_text(self.context, changed, plain)
        except (ApiError, RequestError):  # RequestError: a tool that has a mark is none that can be described
            return None

    def encode(self, text: str) -> Sequence[int]:
        return self.context.encode(text, False, chat_marks.FIELD)
