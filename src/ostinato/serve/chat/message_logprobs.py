"""Which of an answer's tokens are those of its message, with their log-probabilities, while it grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ostinato.schedule.batch import TokenLogprobs
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.chat.token_texts import Offsets
from ostinato.serve.parsing.answer import AnswerDelta


class Scored(Protocol):
    """What an output has gained, or all of it."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None: ...


class MessageLogprobs:
    """Takes the pieces of one output, in order, with what each adds to the answer.

    A token belongs to the content that it has a character of; those of reasoning and calls belong to no message. Those
    that end the answer, and have no text in it, belong to the message if nothing stands behind that.
    """

    def __init__(self, text: ModelText, skip_special_tokens: bool, is_plain: bool) -> None:
        """`is_plain`: all of the answer is content."""
        self._texts, self._is_plain = text.token_texts, is_plain
        self._offsets = Offsets(text.token_texts, text.tokenizer, skip_special_tokens)
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        """Tokens about which nothing is known yet: where each begins and ends."""

    def take(self, piece: Scored, delta: AnswerDelta) -> list[dict[str, Any]]:
        """Of the tokens of the content that a piece added."""
        for token_id, logprob in zip(piece.token_ids, piece.logprobs or (), strict=True):
            begin = self._offsets.next(token_id)
            self._waiting.append((begin, self._offsets.end, logprob))
        if self._is_plain:
            return self.rest() if delta.content else []
        found = []
        for begin, end in delta.content_spans:
            while self._waiting and self._waiting[0][0] < end:
                first, last, logprob = self._waiting.popleft()
                if last > begin or first >= begin:
                    found.append(logprob)
        return self._texts.chat_objects(found)

    def rest(self) -> list[dict[str, Any]]:
        """Of the tokens that are left: at the end of the answer those that ended it."""
        left = [logprob for _, _, logprob in self._waiting]
        self._waiting.clear()
        return self._texts.chat_objects(left)
