"""Marks in the bodies of conversations, and their positions in the prompt that the chat template makes.

A template says nothing of where its parts come from. A mark after a whole message is where the conversation up to that
message ends, rendered alone. A mark inside a message, or after tools, is where a word stands that is put there. Both
count only if the text before them is that of the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ostinato.json_io import JsonObject
from ostinato.kv_cache.marks import DEFAULT_TTL, MAX_MARKS, Mark
from ostinato.media.media_input import RenderedChat
from ostinato.media.message_media import split_media
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.conversation import ChatMark, Conversation, render_text
from ostinato.serve.http.api_errors import ApiError, field_error
from ostinato.serve.http.unknown_fields import check_members

TTLS = {"5m": DEFAULT_TTL, "1h": 3600.0}
"""Times of Anthropic's API -> seconds."""

MAX_TTL = 10**9
"""Most seconds that a body may ask for; the engine's `max_checkpoint_ttl` is usually lower."""

_BETWEEN = " \t\r\n\"',:{"
"""Characters that may stand between the end of a marked text and the word put after it."""
_MAX_MERGED = 4
"""Tokens at the end of a text that may differ where more text follows."""


def read_ttl(value: object, where: str) -> float:
    """Return the seconds of a `ttl`: `5m` (as null), `1h`, or a number. ApiError for others."""
    if value is None or (isinstance(value, str) and value in TTLS):
        return TTLS[value or "5m"]
    # An integer of a body may be larger than any float.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_TTL:
        return float(value)
    raise field_error(where, f"should be {' or '.join(TTLS)}, or a number of seconds up to {MAX_TTL:,}")


def read_cache_control(value: object, where: str) -> float | None:
    """Return the seconds that Anthropic's `cache_control` asks for; None without one. ApiError if it is not valid."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "ephemeral":
        raise field_error(where, 'should be {"type": "ephemeral"}, with an optional ttl of 5m or 1h')
    check_members(value, ("type", "ttl"), where)
    return read_ttl(value.get("ttl"), f"{where}.ttl")


def read_breakpoints(
    values: Sequence[int | JsonObject] | None,
    roles: Sequence[str],
    num_tools: int,
    messages: Sequence[int | None],
    what: str = "messages",
) -> list[ChatMark]:
    """Return the marks of the field `cache_breakpoints`.

    They are indices of `what`, or `{"after": "system", "tools" or an index}`. `messages` has the message that each of
    these is in the conversation, None for one that is a part of another; `roles` are those of the messages. An object
    may have a `ttl`. ApiError, which names the entry, for what is not there.
    """
    marks, count = [], len(messages)
    for where, after, ttl in _entries(values):
        if after == "tools" and num_tools:
            marks.append(ChatMark(where, ttl, tool=num_tools - 1))
            continue
        leading = [place for place, role in enumerate(roles) if role in ("system", "developer")]
        message = leading[0] if after == "system" and leading else None
        if _is_integer(after) and -count <= after < count:
            message = messages[after]
            if message is None:
                raise field_error(where, f"is a part of the message after or before it; give another of the {what}")
        if message is None:
            known = [f"an index of {what} (0 to {count - 1}, or from the end, -1)"]
            known += ['{"after": "system"}'] * bool(leading) + ['{"after": "tools"}'] * bool(num_tools)
            raise field_error(where, f"should be {' or '.join(known)}")
        marks.append(ChatMark(where, ttl, message))
    return marks


def read_positions(
    work: RequestContext, values: Sequence[int | JsonObject] | None, prompt: str | list[int], token_ids: Sequence[int]
) -> dict[str, Mark]:
    """Return the marks of `cache_breakpoints` in a prompt that is no conversation, by their places in the body.

    They are positions in the prompt, or `{"after": a position, "ttl": ...}`: characters of a text, or token ids; from
    the end if negative. ApiError, which names the entry, for what is not there.
    """
    marks, count = {}, len(prompt)
    for where, after, ttl in _entries(values):
        if not _is_integer(after) or not -count < after <= count or after == 0:
            unit = "characters" if isinstance(prompt, str) else "token ids"
            raise field_error(where, f"should be a number of {unit} from 1 to {count}, or from the end, such as -1")
        position = after % count or count
        if isinstance(prompt, str):
            position = _token_position(work, prompt[:position], token_ids, where, adds_special=True)
        if not position:
            raise field_error(where, "cannot be located: the text up to it has other tokens than the prompt")
        marks[where] = Mark(position, ttl)
    return marks


def _entries(values: Sequence[int | JsonObject] | None) -> Iterator[tuple[str, Any, float]]:
    """Yield (place in the body, what the mark follows, seconds). ApiError for too many, and a wrong form or time."""
    check_number(values or (), "cache_breakpoints")
    for number, value in enumerate(values or ()):
        where, ttl = f"cache_breakpoints[{number}]", DEFAULT_TTL
        after: Any = value
        if isinstance(value, dict):
            check_members(value, ("after", "ttl"), where)
            ttl, after = read_ttl(value.get("ttl"), f"{where}.ttl"), value.get("after")
        yield where, after, ttl


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(marks: Sequence[object], param: str) -> None:
    """Raise ApiError for more marks than a request may have."""
    if len(marks) > MAX_MARKS:
        raise ApiError(400, f"{param}: {len(marks)} marks are too many; a request may have {MAX_MARKS}", param=param)


def locate_marks(
    work: RequestContext, conversation: Conversation, rendered: RenderedChat, token_ids: Sequence[int]
) -> tuple[dict[str, Mark], list[str]]:
    """Return the conversation's marks {place in the body: at its token}, and the places that cannot be located."""
    marks: dict[str, Mark] = {}
    missing: list[str] = []
    word = _word_beside(rendered.text)
    for mark in conversation.marks:
        end = _text_end(work, conversation, mark, rendered.text, word)
        position = 0 if end is None else _token_position(work, rendered.text[:end], token_ids, mark.where)
        if position:
            marks[mark.where] = Mark(position, mark.ttl)
        else:
            missing.append(mark.where)
    return marks, missing


def _word_beside(prompt: str) -> str:
    """Return a word that a template gives out as it is, and that a prompt cannot have: it is made of the prompt."""
    return f"OstinatoCacheMark{hashlib.sha256(prompt.encode(errors='replace')).hexdigest()[:16]}"


def _token_position(
    work: RequestContext, text: str, token_ids: Sequence[int], param: str, adds_special: bool = False
) -> int:
    """Return how many tokens the prompt shares with a text that it begins with; 0 if that is not nearly all of it.

    Images have no text: a mark after one is not located.
    """
    prefix = work.encode(text, adds_special, param) if text else []
    shared = _shared(prefix, token_ids)
    return shared if len(prefix) - shared <= _MAX_MERGED else 0


def _text_end(work: RequestContext, conversation: Conversation, mark: ChatMark, prompt: str, word: str) -> int | None:
    """Return the position of a mark in the text of the prompt; None if it cannot be located."""
    if mark.tool is not None:
        return _end_after_tool(work, conversation, mark.tool, prompt, word)
    messages = list(conversation.messages)
    if mark.part is None:
        upto = replace(
            conversation,
            messages=messages[: mark.message + 1],
            add_generation_prompt=False,
            continue_final_message=False,
        )
        alone = _rendered(work, upto)
        if alone is not None:
            # A template may end a conversation with a token that does not stand between its messages.
            shared = _shared(alone, prompt)
            if shared and not alone[shared:].strip():
                return shared
    content = messages[mark.message].get("content")
    if isinstance(content, str):
        end = len(content) if mark.end is None else mark.end
        content = content[:end] + word + content[end:]
    elif isinstance(content, list):
        part = len(content) if mark.part is None else mark.part + 1
        content = [*content[:part], {"type": "text", "text": word}, *content[part:]]
    else:
        return None
    messages[mark.message] = {**messages[mark.message], "content": content}
    return _end_before_word(_rendered(work, replace(conversation, messages=messages)), prompt, word)


def _end_after_tool(work: RequestContext, conversation: Conversation, index: int, prompt: str, word: str) -> int | None:
    """Return where the description of a tool ends; of a template that knows its members alone, the text of it."""
    tools = list(conversation.tools or ())
    if index >= len(tools):
        return None
    function = tools[index]["function"]
    texts = {name: f"{function[name]}{word}" for name in ("description", "name") if function.get(name)}
    for changed in ({**function, word: True}, *({**function, name: text} for name, text in texts.items())):
        changed_tools = [*tools[:index], {**tools[index], "function": changed}, *tools[index + 1 :]]
        end = _end_before_word(_rendered(work, replace(conversation, tools=changed_tools)), prompt, word)
        if end is not None:
            return end
    return None


def _end_before_word(marked: str | None, prompt: str, word: str) -> int | None:
    """Return the length of what stands before the word in `marked`, if the prompt begins so too."""
    place = -1 if marked is None else marked.find(word)
    if marked is None or place < 0:
        return None
    shared = _shared(marked[:place], prompt)
    return None if marked[shared:place].strip(_BETWEEN) else shared


def _rendered(work: RequestContext, conversation: Conversation) -> str | None:
    """Return the text of a conversation without its images; None if the template refuses it."""
    try:
        plain, _ = split_media(conversation.messages, None)
        return render_text(work, conversation, plain)
    except ApiError:
        return None


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or two lists of tokens."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
