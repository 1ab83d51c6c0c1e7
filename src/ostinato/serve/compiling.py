"""Guides of requests, compiled apart from steps and answers."""

from __future__ import annotations

import asyncio

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.errors import RequestError
from ostinato.sample.guide import Guide
from ostinato.serve.http.errors import ApiError

MOST_WAITING = 64
"""Requests whose grammars wait: each may take a second."""


class Compiling:
    """Has the engine compile one guide at a time, while steps go on. Of several requests with one guide, the first
    compiles it for all."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def checked(self, guide: Guide, param: str) -> Guide:
        """The guide, once it is compiled. ApiError, which names `param`, if it cannot be; 429 if too many wait."""
        if self._num_waiting >= MOST_WAITING:
            message = f"{self._num_waiting} requests wait for their grammars to be compiled already"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self._num_waiting += 1
        try:
            async with self._turn:
                await self._engine.compile_guide(guide)
                return guide
        except RequestError as error:
            raise ApiError(400, error.message, param=param) from None
        finally:
            self._num_waiting -= 1
