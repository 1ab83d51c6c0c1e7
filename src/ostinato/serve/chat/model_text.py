"""What the endpoints know of a model's text: its tokens, its chat template, and the formats of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import RequestError
from ostinato.serve.chat.seeing import Seeing, for_clients
from ostinato.serve.chat.token_texts import TokenTexts
from ostinato.serve.compiling import Compiling
from ostinato.serve.http.errors import ApiError
from ostinato.serve.parsing.formats import detect_formats

T = TypeVar("T")

SHORT = 4096
"""Characters, or tokens, whose translation on the event loop takes at most milliseconds. More goes to a thread."""


class ModelText:
    """Made once for an engine, for the event loop."""

    def __init__(self, engine: AsyncEngine, max_images: int) -> None:
        self.tokenizer = engine.tokenizer
        self.chat_template = engine.chat_template
        template = engine.chat_template.text
        self.formats = detect_formats(template)
        self.special_tags = frozenset(tag for tag in self.formats.tags if _is_special(engine.tokenizer, tag))
        """Those tags of the formats that are special tokens, which a text is usually without."""
        self.takes_tools = "tools" in template
        self.knows_developer = "developer" in template
        self.compiling = Compiling(engine)
        self.token_texts = TokenTexts(engine.tokenizer)
        self.media = for_clients(engine.media, max_images)
        self.seeing = Seeing()
        self.vocab_size = engine.vocab_size
        self.max_model_len: int = engine.plan.settings.max_model_len

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text. ApiError, which names `param`, if it has none, or is too long for the model in any case:
        to find that out by tokenising it may take seconds."""
        most = self.max_model_len * self.tokenizer.longest_token
        if len(text) > most:
            room = f"max_model_len ({self.max_model_len}) has room for at most {most}"
            raise ApiError(400, f"the prompt has {len(text)} characters, and {room}", param=param)
        with_param = _naming(param, lambda: self.tokenizer.encode(text, add_special_tokens))
        return await at_leisure(len(text), with_param)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids of the vocabulary."""
        return await at_leisure(len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    def shows_tags(self, skip_special_tokens: bool | None) -> dict[str, bool]:
        """The sampling parameter that leaves tags which are special tokens in an answer, unless the request sets it."""
        return {"skip_special_tokens": False} if self.special_tags and skip_special_tokens is None else {}

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """ApiError unless all ids are of the model's vocabulary."""
        outside = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            message = f"{param} holds token id {outside}; the model's lie between 0 and {self.vocab_size - 1}"
            raise ApiError(400, message, param=param)


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    token_id = tokenizer.token_id(text)
    return token_id is not None and tokenizer.has_no_text(token_id, True)


async def at_leisure(size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` characters or tokens, away from the event loop if they are many."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def _naming(param: str, work: Callable[[], T]) -> Callable[[], T]:
    def named() -> T:
        try:
            return work()
        except RequestError as error:
            raise ApiError(400, error.message, param=param) from None

    return named
