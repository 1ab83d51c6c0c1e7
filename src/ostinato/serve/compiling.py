"""Grammars for requests, compiled apart from steps and answers."""

from __future__ import annotations

import asyncio

from ostinato.engine.engine import Engine
from ostinato.errors import RequestError
from ostinato.sample.grammar import Grammar
from ostinato.sample.guide import Guide
from ostinato.serve.errors import ApiError

MOST_WAITING = 64
"""Requests whose grammars wait: each may take a second."""


class Compiling:
    """Compiles one guide at a time, on a thread: as many as clients ask for would take the processor from the engine.
    Of several requests with one guide, the first compiles it for all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def grammar(self, guide: Guide, param: str) -> Grammar:
        """The grammar of a guide. ApiError, which names `param`, if there is none; 429 if too many wait."""
        if self._num_waiting >= MOST_WAITING:
            message = f"{self._num_waiting} requests wait for their grammars to be compiled already"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        self._num_waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(self._engine.compile_guide, guide)
        except RequestError as error:
            raise ApiError(400, error.message, param=param) from None
        finally:
            self._num_waiting -= 1
