"""Slow work for requests, done beside the event loop: guides are compiled and images prepared, few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.errors import RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.http.errors import ApiError

T = TypeVar("T")

MOST_WAITING = 64
"""Requests that may wait for guides, and again for images; more are told to come later. Each may take a second."""


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
