"""One output of a chat, taken apart while it grows: reasoning, content, tool calls, and why it ended."""

from __future__ import annotations

import bisect
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ostinato.serve.chat.conversation import AnswerForm
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.parsing.answer import AnswerDelta, AnswerParser, ToolCallDelta


class Piece(Protocol):
    """What an output has gained, or all of it."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...


class Answer:
    """Takes the pieces of one output, in order; how it is cut into pieces changes nothing."""

    def __init__(self, text: ModelText, form: AnswerForm) -> None:
        self._text, self._form = text, form
        self._num_calls = 0
        self._reasoned = False
        self._parser = None
        if not form.is_plain:
            self._parser = AnswerParser(
                form.formats,
                tools=form.tools,
                starts_in_reasoning=form.starts_in_reasoning,
                new_id=_call_id,
                either=form.either,
            )

    def take(self, piece: Piece) -> AnswerDelta:
        """What the next piece adds."""
        if self._parser is None:
            return AnswerDelta(piece.text)
        delta = self._parser.push(self._without_end(piece))
        if piece.finish_reason is not None:
            delta = _joined(delta, self._parser.finish())
        if delta.tool_calls and not self._form.parallel:
            delta = replace(delta, tool_calls=tuple(call for call in delta.tool_calls if call.index == 0))
        self._num_calls += len(delta.tool_calls)
        self._reasoned = self._reasoned or bool(delta.reasoning)
        return delta

    def finish_reason(self, piece: Piece) -> str | None:
        """Why the output ended, as OpenAI says it; to be asked once `take` has the piece."""
        return "tool_calls" if piece.finish_reason == "stop" and self._num_calls else piece.finish_reason

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of all the output's tokens are its reasoning, with the tags around it."""
        tags, tokenizer = self._form.formats.reasoning, self._text.tokenizer
        if tags is None or not self._reasoned:
            return 0
        end = tokenizer.token_id(tags.end)
        if end is not None and end in token_ids:
            return token_ids.index(end) + 1

        def ends_before(count: int) -> bool:
            return tags.end in tokenizer.decode(token_ids[:count], False)

        return min(len(token_ids), bisect.bisect_left(range(len(token_ids) + 1), True, key=ends_before))

    def _without_end(self, piece: Piece) -> str:
        """The text without that of the token that ended it, which is there where special tokens are shown."""
        if piece.finish_reason != "stop" or isinstance(piece.stop_reason, str) or not piece.token_ids:
            return piece.text
        last = piece.token_ids[-1]
        if not self._text.tokenizer.has_no_text(last, True):
            return piece.text
        return piece.text.removesuffix(self._text.tokenizer.decode_token(last, False))


def _joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    calls = {call.index: call for call in first.tool_calls}
    for call in second.tool_calls:
        before = calls.get(call.index)
        if before is not None:
            call = ToolCallDelta(call.index, before.id, before.name, before.arguments + call.arguments)
        calls[call.index] = call
    content, reasoning = first.content + second.content, first.reasoning + second.reasoning
    return AnswerDelta(content, reasoning, tuple(calls.values()), first.content_spans + second.content_spans)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
