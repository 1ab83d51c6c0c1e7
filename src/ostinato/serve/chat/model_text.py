"""What the endpoints know of the model's text: its tokenizer, its chat template, and the formats of its answers.

And slow work for requests, done beside the event loop: guides are compiled and images prepared, few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.errors import RequestError
from ostinato.media.input import MediaInput
from ostinato.media.load import Sources
from ostinato.sample.guide import Guide
from ostinato.serve.chat.calls.forms import known_forms
from ostinato.serve.chat.detection import detect_formats, takes_tools
from ostinato.serve.chat.token_texts import TokenTexts
from ostinato.serve.http.errors import ApiError

log = logging.getLogger("ostinato.serve")

T = TypeVar("T")

MOST_WAITING = 64
"""Requests that may wait for guides, and again for images; more are told to come later. Each may take a second."""
SHORT = 4096
"""Up to so many characters or tokens are encoded, decoded or rendered on the event loop, within milliseconds. More of
them go to a thread."""


class Background:
    """Compiles one guide at a time, in the engine's process, and prepares the images of two requests at a time, on
    threads of this one. A large image takes some hundred megabytes while it is decoded."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._compiler = asyncio.Lock()
        self._threads = ThreadPoolExecutor(2, "images")
        self._num_waiting = {"grammars to be compiled": 0, "images to be prepared": 0}

    async def compiled(self, guide: Guide, param: str) -> Guide:
        """The guide, once the engine has compiled it. Requests with the same guide compile it once.

        Raises ApiError, which names `param`, if that cannot be done, and with status 429 if too many wait.
        """
        with self._place("grammars to be compiled"):
            try:
                async with self._compiler:
                    await self._engine.compile_guide(guide)
                    return guide
            except RequestError as error:
                raise ApiError(400, error.message, param=param) from None

    async def prepared(self, work: Callable[[], T]) -> T:
        """The result of `work` on images. ApiError 429 if too many wait."""
        with self._place("images to be prepared"):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextmanager
    def _place(self, what: str) -> Iterator[None]:
        waiting = self._num_waiting[what]
        if waiting >= MOST_WAITING:
            message = f"{waiting} requests wait for their {what} already"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self._num_waiting[what] += 1
        try:
            yield
        finally:
            self._num_waiting[what] -= 1


class ModelText:
    """Made once for an engine, and used on the event loop."""

    def __init__(self, engine: AsyncEngine, max_images: int) -> None:
        self.tokenizer = engine.tokenizer
        self.chat_template = engine.chat_template
        template = engine.chat_template.text
        self.formats = detect_formats(engine.chat_template)
        self.special_tags = _special_tags(engine.tokenizer, self.formats.tags)
        """The tags of the formats that are special tokens, which decoding usually leaves out, with their ids."""
        self.takes_tools = takes_tools(engine.chat_template)
        if self.takes_tools and self.formats.tools is None:
            log.warning(
                "the chat template takes tools, but writes calls in none of the known forms, so requests with tools "
                "are refused; known are those of %s",
                known_forms(),
            )
        self.knows_developer = "developer" in template
        self.background = Background(engine)
        self.token_texts = TokenTexts(engine.tokenizer)
        self.media = _for_clients(engine.media, max_images)
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
        return await off_loop_if_long(len(text), with_param)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids of the vocabulary."""
        return await off_loop_if_long(len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    def shows_tags(self, skip_special_tokens: bool | None) -> dict[str, bool]:
        """The sampling parameter that keeps tags in the answer that are special tokens, unless the request sets it."""
        return {"skip_special_tokens": False} if self.special_tags and skip_special_tokens is None else {}

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """ApiError unless all ids are in the model's vocabulary."""
        outside = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            message = f"{param} holds token id {outside}; the model's lie between 0 and {self.vocab_size - 1}"
            raise ApiError(400, message, param=param)


def _for_clients(media: MediaInput | None, max_images: int) -> MediaInput | None:
    """How the server takes in images: no client can have it read files of this machine."""
    if media is None:
        return None
    return replace(media, sources=Sources(files=False, remote=media.sources.remote), max_images=max_images)


def _special_tags(tokenizer: Tokenizer, tags: Sequence[str]) -> dict[str, int]:
    """Those of the tags that are special tokens, with their ids."""
    ids = {tag: tokenizer.token_id(tag) for tag in tags}
    return {tag: id for tag, id in ids.items() if id is not None and tokenizer.has_no_text(id, True)}


async def off_loop_if_long(size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` characters or tokens, on a thread if they are many."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def _naming(param: str, work: Callable[[], T]) -> Callable[[], T]:
    def named() -> T:
        try:
            return work()
        except RequestError as error:
            raise ApiError(400, error.message, param=param) from None

    return named
