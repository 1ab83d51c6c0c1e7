"""Marks in conversations: positions after a message or a tool, located in the prompt that the chat template makes.

A template says nothing of where its parts come from. A mark after a whole message is where the conversation up to that
message ends, rendered alone. A mark inside a message, or after tools, is where a word stands that is put there. Both
count only if the text before them is that of the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.engine.text.chat_messages import ChatMessage
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import RequestError
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.kv_cache.marks import DEFAULT_TTL, MAX_MARKS, Mark
from ostinato.media.media_input import RenderedChat
from ostinato.media.message_media import split_media
from ostinato.setting_names import plain_numbers

FIELD = "cache_breakpoints"
"""Name of the argument, and of the field in bodies."""
MEMBERS = ("after", "ttl")
"""Members of an entry that is an object."""

TTLS = {"5m": DEFAULT_TTL, "1h": 3600.0}
"""Times of Anthropic's API -> seconds."""

MAX_TTL = 10**9
"""Most seconds that a mark may ask for; the engine's `max_checkpoint_ttl` is usually lower."""

_BETWEEN = " \t\r\n\"',:{"
"""Characters that may stand between the end of a marked text and the word put after it."""
_MAX_MERGED = 4
"""Tokens at the end of a text that may differ where more text follows."""


@dataclass(frozen=True)
class ChatMark:
    """A mark in a conversation: after a message, or after its first parts, or after a tool."""

    where: str
    """Place of the mark in the body, or in the arguments of the call."""
    ttl: float
    message: int = 0
    part: int | None = None
    """Index of the last part of the message before it; None: it follows the whole message."""
    end: int | None = None
    """Characters of the message's text before it, if that is one text."""
    tool: int | None = None
    """Index of the tool that it follows, in place of a message."""


class ChatText(Protocol):
    """A conversation that can be rendered again, changed, and whose texts can be encoded."""

    @property
    def messages(self) -> Sequence[ChatMessage]: ...

    @property
    def tools(self) -> Sequence[JsonMapping] | None: ...

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonMapping] | None, answered: bool
    ) -> str | None:
        """Return the text without images; None if the template refuses. `answered`: with no header of an answer."""

    def encode(self, text: str) -> Sequence[int]: ...


@dataclass(frozen=True)
class TemplateChat:
    """A conversation in the arguments of a call (`ChatText`)."""

    messages: Sequence[ChatMessage]
    template: ChatTemplate
    tokenizer: Tokenizer
    arguments: Mapping[str, Any]
    """Arguments of the template, tools among them."""

    @property
    def tools(self) -> Sequence[JsonMapping] | None:
        tools: Sequence[JsonMapping] | None = self.arguments.get("tools")
        return tools

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonMapping] | None, answered: bool
    ) -> str | None:
        arguments = {**self.arguments, "tools": tools}
        if answered:
            arguments |= {"add_generation_prompt": False, "continue_final_message": False}
        try:
            plain, _ = split_media(messages)
            return self.template.render(plain, **arguments)
        except RequestError:
            return None

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def place(self, breakpoints: Sequence[int | JsonObject], rendered: RenderedChat) -> list[Mark]:
        """Return the marks of the argument `cache_breakpoints` in the prompt that was `rendered`.

        RequestError, which names the entry, for one that is not there or cannot be located.
        """
        roles = [str(message.get("role")) for message in self.messages]
        marks = read_breakpoints(breakpoints, roles, len(self.tools or ()), range(len(roles)))
        if not marks:
            return []
        token_ids = self.encode(rendered.text) if rendered.media is None else rendered.media.token_ids
        located, missing = locate_marks(self, marks, rendered.text, token_ids)
        for where in missing:
            raise _wrong(where, "cannot be located: the chat template changes what stands before it, or an image does")
        return list(located.values())


def read_ttl(value: object, where: str) -> float:
    """Return the seconds of a `ttl`: `5m` (as null), `1h`, or a number. RequestError for others."""
    if value is None or (isinstance(value, str) and value in TTLS):
        return TTLS[value or "5m"]
    # An integer of a body may be larger than any float.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_TTL:
        return float(value)
    raise _wrong(where, f"should be {' or '.join(TTLS)}, or a number of seconds up to {MAX_TTL:,}")


def read_breakpoints(
    values: Sequence[int | JsonObject],
    roles: Sequence[str],
    num_tools: int,
    messages: Sequence[int | None],
    what: str = "messages",
) -> list[ChatMark]:
    """Return the marks of `cache_breakpoints`.

    They are indices of `what`, or `{"after": "system", "tools" or an index}`. `messages` has the message that each of
    these is in the conversation, None for one that is a part of another; `roles` are those of the messages. An object
    may have a `ttl`. RequestError, which names the entry, for what is not there.
    """
    marks, count = [], len(messages)
    for where, after, ttl in read_entries(values):
        if after == "tools" and num_tools:
            marks.append(ChatMark(where, ttl, tool=num_tools - 1))
            continue
        leading = [place for place, role in enumerate(roles) if role in ("system", "developer")]
        message = leading[0] if after == "system" and leading else None
        if is_integer(after) and -count <= after < count:
            message = messages[after]
            if message is None:
                raise _wrong(where, f"is a part of the message after or before it; give another of the {what}")
        if message is None:
            known = [f"an index of {what} (0 to {count - 1}, or from the end, -1)"]
            known += ['{"after": "system"}'] * bool(leading) + ['{"after": "tools"}'] * bool(num_tools)
            raise _wrong(where, f"should be {' or '.join(known)}")
        marks.append(ChatMark(where, ttl, message))
    return marks


def read_entries(values: Sequence[int | JsonObject]) -> Iterator[tuple[str, Any, float]]:
    """Yield (place, what the mark follows, seconds). RequestError for too many, and a wrong form or time."""
    entries = list_of_marks(values, FIELD)
    check_number(entries, FIELD)
    for number, value in enumerate(entries):
        where, ttl = f"{FIELD}[{number}]", DEFAULT_TTL
        after: Any = value
        if isinstance(value, Mapping):
            for name in value:
                if name not in MEMBERS:
                    raise RequestError(f"{where} has no {name}; known are {' and '.join(MEMBERS)}", setting=where)
            ttl, after = read_ttl(value.get("ttl"), f"{where}.ttl"), value.get("after")
        yield where, after, ttl


def list_of_marks(values: Any, where: str) -> list[Any]:
    """Return a caller's marks as a list, its integers as Python's; None has none. RequestError for a single value."""
    if values is None:
        return []
    # An iterator would have marks for the first of several prompts alone. An array of no dimensions has a length too.
    is_several = isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping)
    if not is_several or getattr(values, "ndim", 1) == 0:
        raise _wrong(where, f"should be a list, not {type(values).__name__}")
    return list(plain_numbers(list(values)))


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(marks: Sequence[object], where: str) -> None:
    """Raise RequestError for more marks than a request may have."""
    if len(marks) > MAX_MARKS:
        message = f"{where}: {len(marks)} marks are too many; a request may have {MAX_MARKS}"
        raise RequestError(message, setting=where)


def _wrong(where: str, problem: str) -> RequestError:
    return RequestError(f"{where} {problem}", setting=where)


def locate_marks(
    chat: ChatText, asked: Sequence[ChatMark], prompt: str, token_ids: Sequence[int]
) -> tuple[dict[str, Mark], list[str]]:
    """Return marks {their place: at a token of the prompt}, and the places that cannot be located."""
    marks: dict[str, Mark] = {}
    missing: list[str] = []
    word = _word_beside(prompt)
    for mark in asked:
        end = _text_end(chat, mark, prompt, word)
        position = token_position(chat.encode(prompt[:end]), token_ids) if end else 0
        if position:
            marks[mark.where] = Mark(position, mark.ttl)
        else:
            missing.append(mark.where)
    return marks, missing


def _word_beside(prompt: str) -> str:
    """Return a word that a template gives out as it is, and that a prompt cannot have: it is made of the prompt."""
    return f"OstinatoCacheMark{hashlib.sha256(prompt.encode(errors='replace')).hexdigest()[:16]}"


def token_position(prefix: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many tokens the prompt shares with a text that it begins with; 0 if that is not nearly all of it.

    Images have no text: a mark after one is not located.
    """
    shared = _shared(prefix, token_ids)
    return shared if len(prefix) - shared <= _MAX_MERGED else 0


def _text_end(chat: ChatText, mark: ChatMark, prompt: str, word: str) -> int | None:
    """Return the position of a mark in the text of the prompt; None if it cannot be located."""
    if mark.tool is not None:
        return _end_after_tool(chat, mark.tool, prompt, word)
    messages = list(chat.messages)
    if mark.part is None:
        alone = chat.render(messages[: mark.message + 1], chat.tools, answered=True)
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
    return _end_before_word(chat.render(messages, chat.tools, answered=False), prompt, word)


def _end_after_tool(chat: ChatText, index: int, prompt: str, word: str) -> int | None:
    """Return where the description of a tool ends; of a template that knows its members alone, the last of these."""
    tools = list(chat.tools or ())
    if index >= len(tools) or not isinstance(function := tools[index].get("function"), Mapping):
        return None
    texts = {name: f"{function[name]}{word}" for name in ("description", "name") if function.get(name)}
    candidates = [{**function, word: True}, *({**function, name: text} for name, text in texts.items())]
    if isinstance(parameters := function.get("parameters"), Mapping):
        candidates.insert(1, {**function, "parameters": {**parameters, word: True}})
    for changed in candidates:
        changed_tools = [*tools[:index], {**tools[index], "function": changed}, *tools[index + 1 :]]
        end = _end_before_word(chat.render(chat.messages, changed_tools, answered=False), prompt, word)
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
