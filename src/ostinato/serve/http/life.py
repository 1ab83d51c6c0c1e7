"""The server's life: starting, ready, draining, ended; and the engine that it has while it lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.process import make_engine
from ostinato.serve.http.errors import ApiError
from ostinato.serve.settings import ServeSettings

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.run.runner import StartProgress

log = logging.getLogger("ostinato.serve")


class Life:
    """Starts the engine behind a server that answers already, and ends it with the server."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServeSettings,
        progress: StartProgress = lambda what, done, total: None,
        make: Callable[[EngineConfig, StartProgress], Engine] = make_engine,
    ) -> None:
        """`make` makes the engine; see `AsyncEngine.start`."""
        self.config, self.settings = config, settings
        self.model_name = settings.served_model_name or _name(config.model)
        self.created = int(time.time())
        self.draining = False
        self.error: BaseException | None = None
        """Why the engine could not start, or ended."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when requests are taken."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when there is nothing left to live for: the engine failed, or everything is drained."""
        self._progress, self._make = progress, make
        self._engine: AsyncEngine | None = None
        self._starting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the engine, on the running loop; returns at once."""
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            engine = await AsyncEngine.start(
                self.config, max_waiting=self.settings.max_waiting, progress=self._progress, make=self._make
            )
        except Exception as error:
            self.error = error
            self.on_end()
            return
        engine.on_failure = self._fail
        self._engine = engine
        self.on_ready()
        log.info("%s is ready", self.model_name)

    def _fail(self) -> None:
        assert self._engine is not None, "an engine that failed was there"
        self.error = self._engine.failure
        log.critical("the engine has failed, and the server ends", exc_info=self.error)
        self.on_end()

    @property
    def status(self) -> str:
        """`starting`, `ready`, `draining` or `failed`."""
        if self.error is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self._engine is not None else "starting"

    @property
    def engine(self) -> AsyncEngine:
        """The engine, once it has succeeded in a step. ApiError 503 while requests are not taken."""
        status = self.status
        if status == "ready":
            assert self._engine is not None, "what is ready has an engine"
            return self._engine
        if status == "failed":
            raise ApiError(503, "the engine has failed and the server is about to end", code="engine_failed")
        if status == "draining":
            raise ApiError(503, "the server is about to end and takes no more requests", code="draining")
        raise ApiError(503, "the model is being loaded", code="starting", headers={"Retry-After": "5"})

    @property
    def present_engine(self) -> AsyncEngine:
        """The engine for those who look at it: also while it drains. ApiError 503 before and after."""
        if self._engine is not None and self.error is None:
            return self._engine
        return self.engine

    async def drain(self) -> None:
        """Takes no more requests, lets those that run end for at most `drain_timeout` seconds, and ends."""
        if self.draining:
            return
        self.draining = True
        clock = asyncio.get_running_loop().time
        until = clock() + self.settings.drain_timeout
        engine = self._engine
        if engine is not None:
            log.info("ending; %d requests are unfinished", engine.num_unfinished)
            while engine.num_unfinished and clock() < until:
                await asyncio.sleep(0.02)
            if engine.num_unfinished:
                log.warning("%d requests did not end within %g s", engine.num_unfinished, self.settings.drain_timeout)
                await engine.stop()  # which tells them so
        self.on_end()

    async def end(self) -> None:
        """Ends the engine, and what is unfinished with it; also one that is being loaded."""
        if self._engine is not None:
            await self._engine.stop()
        elif self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    def exit_status(self) -> int:
        """0 after a drain; 1 if the engine failed. Raises why the engine could not start."""
        if self.error is None:
            return 0
        if self._engine is None:
            raise self.error
        return 1


def _name(model: str) -> str:
    """A checkpoint's name without its place on this machine."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
