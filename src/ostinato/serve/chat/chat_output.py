"""One output of a chat while it grows: reasoning, content, tool calls, and each part's log-probabilities."""

from __future__ import annotations

import bisect
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ostinato.engine.text.chat_messages import read_arguments
from ostinato.json_io import JsonObject
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.chat.answer_formats import AnswerDelta, AnswerLayout, ToolCallDelta
from ostinato.serve.chat.answer_parser import AnswerParser
from ostinato.serve.chat.text_support import ModelText, Offsets


class OutputPart(Protocol):
    """Delta of an output, or a whole output."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs | None] | None: ...


class ChatOutput:
    """Parser of one output's pieces, in order. The result does not depend on where the output was cut into pieces."""

    def __init__(self, text: ModelText, layout: AnswerLayout) -> None:
        self._text, self._layout = text, layout
        self._num_calls = 0
        self._reasoned = False
        self._parser = None
        if not layout.is_plain:
            self._parser = AnswerParser(
                layout.formats,
                tools=layout.tools,
                starts_in_reasoning=layout.starts_in_reasoning,
                new_id=lambda: f"call_{uuid.uuid4().hex[:24]}",
                calls_or_content=layout.calls_or_content,
                enforced=layout.enforced,
            )

    def take(self, piece: OutputPart) -> AnswerDelta:
        """Return what the next piece adds."""
        if self._parser is None:
            return AnswerDelta(piece.text)
        delta = self._parser.push(self._without_end(piece))
        if piece.finish_reason is not None:
            delta = joined(delta, self._parser.finish(is_cut=piece.finish_reason != "stop"))
        if delta.tool_calls and not self._layout.parallel:
            delta = replace(delta, tool_calls=tuple(call for call in delta.tool_calls if call.index == 0))
        self._num_calls += len(delta.tool_calls)
        self._reasoned = self._reasoned or bool(delta.reasoning)
        return delta

    def finish_reason(self, piece: OutputPart) -> str | None:
        """Return why the output ended, in OpenAI's words. Call it after `take` of the same piece."""
        return "tool_calls" if piece.finish_reason == "stop" and self._num_calls else piece.finish_reason

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Count the output's tokens that are reasoning, the tags included."""
        tags, tokenizer = self._layout.formats.reasoning, self._text.tokenizer
        if tags is None or not self._reasoned:
            return 0
        end = tokenizer.token_id(tags.end)
        if end is not None and end in token_ids:
            return token_ids.index(end) + 1

        def ends_before(count: int) -> bool:
            return tags.end in tokenizer.decode(token_ids[:count], False)

        return min(len(token_ids), bisect.bisect_left(range(len(token_ids) + 1), True, key=ends_before))

    def _without_end(self, piece: OutputPart) -> str:
        """Return the text without the token that ended it, which has text only if special tokens are shown."""
        if piece.finish_reason != "stop" or isinstance(piece.stop_reason, str) or not piece.token_ids:
            return piece.text
        last = piece.token_ids[-1]
        if not self._text.tokenizer.has_no_text(last, True):
            return piece.text
        return piece.text.removesuffix(self._text.tokenizer.decode_token(last, False))


def joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    """Return two additions of one answer as one."""
    calls = {call.index: call for call in first.tool_calls}
    for call in second.tool_calls:
        before = calls.get(call.index)
        if before is not None:
            call = ToolCallDelta(call.index, before.id, before.name, before.arguments + call.arguments)
        calls[call.index] = call
    content, reasoning = first.content + second.content, first.reasoning + second.reasoning
    return AnswerDelta(content, reasoning, tuple(calls.values()), first.content_spans + second.content_spans)


def arguments_of(text: str) -> JsonObject:
    """Return the arguments of a call as an object. If they were cut off, return those that are whole."""
    return read_arguments(text) or {}


class MessageLogprobs:
    """Log-probabilities of an output that belong to its messages. It takes the pieces in order, with their deltas.

    A token belongs to the message if one of its characters does. Tokens of reasoning and calls belong to no message.
    Tokens that end the answer, and have no text, belong to the message if it comes last.
    """

    def __init__(self, text: ModelText, skip_special_tokens: bool, is_plain: bool) -> None:
        """Begin an output; `is_plain`: the whole answer is content."""
        self._is_plain = is_plain
        self._offsets = Offsets(text.token_texts, text.tokenizer, skip_special_tokens)
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        """Tokens whose part of the answer is not known yet: (begin, end, log-probability), places in characters."""

    def take(self, piece: OutputPart, delta: AnswerDelta) -> list[TokenLogprobs]:
        """Return the log-probabilities of the content's tokens that a piece added."""
        for token_id, logprob in zip(piece.token_ids, piece.logprobs or (), strict=True):
            begin = self._offsets.next(token_id)
            if logprob is not None:
                self._waiting.append((begin, self._offsets.end, logprob))
        if self._is_plain:
            return self.rest() if delta.content else []
        found = []
        for begin, end in delta.content_spans:
            while self._waiting and self._waiting[0][0] < end:
                first, last, logprob = self._waiting.popleft()
                if last > begin or first >= begin:
                    found.append(logprob)
        return found

    def rest(self) -> list[TokenLogprobs]:
        """Return the log-probabilities that are left: at the end, those of the tokens that ended the answer."""
        left = [logprob for _, _, logprob in self._waiting]
        self._waiting.clear()
        return left
