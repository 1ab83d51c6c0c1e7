"""The server's lifecycle: starting, ready, stalled, draining or failed; and its engine.

The delay of the event loop is measured: all clients wait for it while one request occupies the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial

from ostinato.config import EngineConfig
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.cache_event_hub import medium_of
from ostinato.engine.process.engine_messages import MakeEngine
from ostinato.engine.process.engine_process import make_engine
from ostinato.errors import EngineFailed
from ostinato.observe.counts import Histogram, ProgressFn, no_progress
from ostinato.serve.body_workers.context import WorkerContext
from ostinato.serve.body_workers.pool import BodyWorkerPool
from ostinato.serve.http.addresses import TrustedProxies
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.api_keys import ApiKeys
from ostinato.serve.http.connection_limits import ConnectionCounter, RefusalLog, fd_limited_connections, raise_fd_limit
from ostinato.serve.settings import ServeSettings
from ostinato.serve.zmq_events import ZmqPublisher
from ostinato.verify.online_checks import make_checked_engine

STALL = 0.02
"""Seconds that no request may hold the loop for."""
_INTERVAL = 0.05
"""Seconds between two checks. A longer stall is always seen; a shorter one in proportion to its length."""
_BOUNDS = (0.001, 0.005, STALL, 0.05, 0.1, 0.25, 1.0, 5.0)


class EventLoopLag:
    """Monitor that asks to be called at certain times, and records how much later that happens."""

    def __init__(self) -> None:
        self.seconds = Histogram(_BOUNDS)
        self.longest = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_stalls(self) -> int:
        """Number of checks that came later than `STALL`."""
        counts = self.seconds.cumulative()
        return counts[-1] - counts[_BOUNDS.index(STALL)]

    def start(self) -> None:
        """Watch the running loop."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            late = max(0.0, clock() - due)
            self.seconds.observe(late)
            self.longest = max(self.longest, late)


log = logging.getLogger("ostinato.serve")

StartEngine = Callable[..., Awaitable[AsyncEngine]]
"""Function that starts an engine, with max_waiting and max_per_client as in `AsyncEngine.start`."""


class ServerLifecycle(ABC):
    """Lifecycle of a server, whatever answers its requests; and what all its connections share."""

    descriptors_per_connection = 1
    """File descriptors that a client's connection takes."""

    def __init__(self, settings: ServeSettings) -> None:
        """Make the lifecycle. ConfigError if the process may not have as many connections as the settings say."""
        self.settings = settings
        self.keys = ApiKeys(settings)
        self.loop_delay = EventLoopLag()
        self.refusals = RefusalLog()
        """Requests and connections refused before the application."""
        self.proxies = TrustedProxies(settings.trusted_proxy)
        raise_fd_limit(settings.max_connections, self.descriptors_per_connection)
        most = settings.max_connections or fd_limited_connections(self.descriptors_per_connection)
        self.occupancy = ConnectionCounter(most, settings.max_connections_per_address, self.proxies.trusts)
        self.draining = False
        self.error: BaseException | None = None
        """Error that kept the server from starting, or ended it."""
        self.dropped_lines: Callable[[], int] = lambda: 0
        """Function that returns the number of dropped lines of output."""
        self.on_ready: Callable[[], None] = lambda: None
        """Function called once requests are accepted."""
        self.on_end: Callable[[], None] = lambda: None
        """Function called when the server should exit: it has failed, or everything is drained."""
        self.starts_fork_server = False
        """True if the fork server of the workers starts before the first request that needs it."""

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new requests, wait at most `drain_timeout` seconds for those that run, and call `on_end`."""

    @abstractmethod
    def exit_status(self) -> int:
        """Return the process's status after the end. If the server could not start, its error is raised."""


class Lifecycle(ServerLifecycle):
    """Lifecycle of the engine: it starts while the server already answers, and stops with the server."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServeSettings,
        progress: ProgressFn = no_progress,
        make: MakeEngine = make_engine,
        start_engine: StartEngine | None = None,
    ) -> None:
        """Make the lifecycle of an engine that is not started yet.

        `make` makes the engine; see `AsyncEngine.start`, which `start_engine` replaces. ConfigError if the process may
        not have as many connections as the settings say.
        """
        super().__init__(settings)
        self.config = config
        self.model_name = settings.name_of(config.model)
        self.created = int(time.time())
        self.before_requests: Callable[[AsyncEngine], object] = lambda engine: None
        """Function called with the engine before requests are accepted: it makes what they all need."""
        if settings.verify_rate:
            make = partial(make_checked_engine, make, settings.verify_rate)
        self._start_engine = start_engine or partial(AsyncEngine.start, config, progress=progress, make=make)
        self._engine: AsyncEngine | None = None
        self._workers: BodyWorkerPool | None = None
        self._publisher: ZmqPublisher | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine on the running loop. Returns at once."""
        self.loop_delay.start()
        self._starting = asyncio.create_task(self._start())

    async def started(self) -> None:
        """Wait until requests are accepted. Raises the error if the engine cannot start."""
        assert self._starting is not None, "to be called after `start`"
        await self._starting
        if self.error is not None:
            raise self.error

    async def _start(self) -> None:
        try:
            if self.settings.publishes_events:
                assert self.settings.kv_events_config is not None, "it says where"
                self._publisher = ZmqPublisher(self.settings.kv_events_config)
            engine = await self._start_engine(
                max_waiting=self.settings.max_waiting, max_per_client=self.settings.client_share
            )
            try:
                await engine.watch(self.settings.engine_timeout, self._stalled)
                if self.settings.kv_events != "off":
                    hub = await engine.publish_cache_events(self.settings.kv_events == "tokens")
                    if self._publisher is not None:
                        made = engine.plan.settings
                        self._publisher.start(hub, made.block_size, medium_of(made.device))
                await asyncio.to_thread(self.before_requests, engine)  # it compiles the checkpoint's chat template
                if engine.failure is not None:  # meanwhile
                    raise engine.failure
            except BaseException:
                await asyncio.shield(engine.stop())
                raise
        except Exception as error:
            self.error = error
            self.on_end()
            return
        remote = self.config.allow_remote_images
        self._workers = BodyWorkerPool(
            WorkerContext(engine.started, self.settings.without_keys(), self.model_name, remote)
        )
        engine.on_failure = self._fail
        engine.backlog.max_bytes = self.settings.client_backlog
        self._engine = engine
        self.on_ready()
        log.info("%s is ready", self.model_name)
        if self.starts_fork_server:
            self._workers.start()

    def _stalled(self, is_stalled: bool) -> None:
        if not is_stalled:
            log.warning("the engine goes on")
            return
        timeout = self.settings.engine_timeout
        log.critical("the engine has given no sign of life for %g s", timeout)
        if self.settings.on_stall == "exit" and self.error is None:
            self.error = EngineFailed(f"the engine has given no sign of life for {timeout:g} s (on_stall: exit)")
            if self._engine is not None:
                self._engine.fail(self.error)  # ends every stream with an error, and the server
            else:
                self.on_end()

    def _fail(self) -> None:
        assert self._engine is not None, "only an engine that started can fail"
        self.error = self._engine.failure
        log.critical("the engine has failed, and the server is shutting down", exc_info=self.error)
        self.on_end()

    @property
    def status(self) -> str:
        """`starting`, `ready`, `stalled`, `draining` or `failed`."""
        if self.error is not None:
            return "failed"
        if self._engine is not None and self._engine.is_stalled:
            return "stalled"
        if self.draining:
            return "draining"
        return "ready" if self._engine is not None else "starting"

    @property
    def engine(self) -> AsyncEngine:
        """The engine, once a step has succeeded. ApiError 503 while requests are not accepted."""
        status = self.status
        if status == "ready":
            assert self._engine is not None, "a server that is ready has an engine"
            return self._engine
        if status == "failed":
            raise ApiError(503, "the engine has failed, and the server is shutting down", code="engine_failed")
        if status == "draining":
            raise ApiError(503, "the server is shutting down and accepts no more requests", code="draining")
        if status == "stalled":
            message = f"the engine has given no sign of life for {self.settings.engine_timeout:g} s"
            raise ApiError(503, message, code="engine_stalled", headers={"Retry-After": "5"})
        raise ApiError(503, "the model is being loaded", code="starting", headers={"Retry-After": "5"})

    @property
    def workers(self) -> BodyWorkerPool:
        """Workers that read large bodies. ApiError 503 while requests are not accepted."""
        assert self.engine is not None
        return self.present_workers

    @property
    def present_workers(self) -> BodyWorkerPool:
        """Workers, also while requests are not accepted, once there has been an engine."""
        assert self._workers is not None, "made with the engine"
        return self._workers

    @property
    def present_engine(self) -> AsyncEngine:
        """Engine for observation only: available also while it drains. ApiError 503 before and after."""
        if self._engine is not None and self.error is None:
            return self._engine
        return self.engine

    async def drain(self) -> None:
        if self.draining:
            return
        self.draining = True
        clock = asyncio.get_running_loop().time
        until = clock() + self.settings.drain_timeout
        engine = self._engine
        if engine is not None:
            engine.end_cache_events()
            log.info("shutting down; %d requests are unfinished", engine.num_unfinished)
            while engine.num_unfinished and clock() < until:
                await asyncio.sleep(0.02)
            if engine.num_unfinished:
                log.warning("%d requests did not end within %g s", engine.num_unfinished, self.settings.drain_timeout)
                await engine.stop()  # ends them with an error
        self.on_end()

    async def stop(self) -> None:
        """Stop the engine, and with it unfinished requests. An engine that is being loaded is stopped too."""
        async with contextlib.AsyncExitStack() as stack:  # which goes on, whatever one part raises
            stack.push_async_callback(self._stop_engine)
            await self.loop_delay.stop()
            if self._publisher is not None:
                await self._publisher.stop()

    async def _stop_engine(self) -> None:
        if self._workers is not None:
            await self._workers.stop()
        if self._engine is not None:
            await self._engine.stop()
        elif self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    def exit_status(self) -> int:
        """Return 0 after a drain; 1 if the engine failed. If the engine could not start, its error is raised."""
        if self.error is None:
            return 0
        if self._engine is None:
            raise self.error
        return 1
