"""The server's process: its socket, its signals and its exit status."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from ostinato.config import EngineConfig
from ostinato.engine.process.engine_messages import MakeEngine
from ostinato.engine.process.engine_process import freeze_gc, make_engine
from ostinato.models.checkpoint import load_spec
from ostinato.observe.counts import ProgressFn
from ostinato.observe.logs import logs_to
from ostinato.observe.output_pump import unblocked_output
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan
from ostinato.serve.app import make_app
from ostinato.serve.http.connection import HttpConnection
from ostinato.serve.http.connection_limits import ConnectionLimits
from ostinato.serve.http.lifecycle import Lifecycle, ServerLifecycle
from ostinato.serve.http.listener import EarlyAnswers, listening, url_of
from ostinato.serve.http.tls import Certificates, TlsLayer
from ostinato.serve.settings import ServeSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 5
"""Seconds that answers have to reach their clients at the end."""


def _lifecycle(config: EngineConfig, settings: ServeSettings, progress: ProgressFn, make: MakeEngine) -> Lifecycle:
    if not settings.is_replicated:
        # The engine's process plans for itself. Here a plan that cannot be is refused before anything listens.
        make_plan(config, load_spec(config), detect(config.device))
        return Lifecycle(config, settings, progress, make)
    from ostinato.serve.ray.cluster import ReplicatedServer

    replicated = ReplicatedServer(config, settings, settings.name_of(config.model), progress)
    return Lifecycle(replicated.layout.config, settings, start_engine=replicated.start)


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers, so that it still answers while requests drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: EngineConfig,
    settings: ServeSettings,
    progress: ProgressFn,
    announce: Callable[[str], None],
    make: MakeEngine = make_engine,
    early: tuple[socket.socket, EarlyAnswers] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine fails. Returns the process's exit status.

    The first signal lets running requests finish, a second one ends the process at once. `announce` is called with
    the server's URL once it listens. `make` makes the engine; see `AsyncEngine.start`. `early` is the socket, if it
    is open already, with the thread that answers on it until the server does. ConfigError if it cannot listen.
    Errors of an engine that cannot be planned, or cannot start, are raised unchanged. Loggers are as before at the
    end.
    """

    def made() -> tuple[ServerLifecycle, ASGIApp]:
        lifecycle = _lifecycle(config, settings, progress, make)
        return lifecycle, make_app(lifecycle)

    return run_server(made, settings, announce, early)


def run_server(
    make: Callable[[], tuple[ServerLifecycle, ASGIApp]],
    settings: ServeSettings,
    announce: Callable[[str], None],
    early: tuple[socket.socket, EarlyAnswers] | None = None,
) -> int:
    """Serve an application with its lifecycle, as `serve` does."""
    with unblocked_output() as dropped, logs_to(settings.log_format, settings.log_level, access=settings.access_log):
        lifecycle, app = make()
        lifecycle.dropped_lines = dropped
        return _run(lifecycle, app, settings, announce, early)


def _run(
    lifecycle: ServerLifecycle,
    app: ASGIApp,
    settings: ServeSettings,
    announce: Callable[[str], None],
    early: tuple[socket.socket, EarlyAnswers] | None,
) -> int:
    certificates = None
    if settings.ssl_certfile is not None:
        certificates = Certificates(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password)
    limits = ConnectionLimits(head_seconds=settings.header_timeout, idle_seconds=settings.keep_alive_timeout)

    def connection(**of_uvicorn: Any) -> asyncio.Protocol:
        spoken = HttpConnection(**of_uvicorn, limits=limits, occupancy=lifecycle.occupancy, refusals=lifecycle.refusals)
        return spoken if certificates is None else TlsLayer(spoken, certificates, lifecycle.refusals)

    server = _Server(
        uvicorn.Config(
            app,
            http=cast(Any, connection),
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE,
        )
    )
    lifecycle.on_end = lambda: setattr(server, "should_exit", True)

    def reload() -> None:
        lifecycle.keys.reload()
        if certificates is not None:
            certificates.reload()

    async def run(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        lifecycle.refusals.watch(loop)
        drains: list[asyncio.Task[None]] = []

        def drain() -> None:
            for each in SIGNALS:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)  # the next one ends the process at once
            drains.append(loop.create_task(lifecycle.drain()))

        def listen() -> None:
            for each in SIGNALS:
                loop.add_signal_handler(each, drain)

        def ready() -> None:
            freeze_gc()
            if not lifecycle.draining:
                listen()  # once more: Ray, started meanwhile, has replaced the handlers

        lifecycle.on_ready, lifecycle.starts_fork_server = ready, True
        listen()
        loop.add_signal_handler(signal.SIGHUP, reload)
        if early is not None:
            early[1].close()
        announce(url_of(listener, is_tls=certificates is not None))
        await server.serve(sockets=[listener])

    opened = listening(settings) if early is None else nullcontext(early[0])
    with opened as listener, asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run(listener))
    return lifecycle.exit_status()
