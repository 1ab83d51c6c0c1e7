"""The server's process: its socket, its signals and its exit status."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from ostinato.config import EngineConfig
from ostinato.engine.process.launch import keep_for_good
from ostinato.errors import ConfigError, reason
from ostinato.observe.logs import configure_logs
from ostinato.serve.app import make_app
from ostinato.serve.http.connection import Connection
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.limits import Limits
from ostinato.serve.settings import ServeSettings

if TYPE_CHECKING:
    from ostinato.engine.run.runner import StartProgress

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 5
"""Seconds that answers have to reach their clients at the end."""


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: it should go on answering while requests drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: EngineConfig,
    settings: ServeSettings,
    progress: StartProgress,
    announce: Callable[[str], None],
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine fails. Returns the process's exit status. The first signal
    lets running requests finish, a second one ends the process at once.

    `announce` is called with the server's URL once it listens. ConfigError if it cannot listen. Errors of an
    engine that cannot start are raised as they are.
    """
    configure_logs(settings.log_format, settings.log_level)
    lifecycle = Lifecycle(config, settings, progress)
    app = make_app(lifecycle)
    listener = _listen(settings)
    limits = Limits(head_seconds=settings.header_timeout, idle_seconds=settings.keep_alive_timeout)
    server = _Server(
        uvicorn.Config(
            app,
            http=cast(Any, partial(Connection, limits=limits, occupancy=lifecycle.occupancy)),  # called with keywords
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE,
        )
    )
    lifecycle.on_ready = keep_for_good
    lifecycle.on_end = lambda: setattr(server, "should_exit", True)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        drains: list[asyncio.Task[None]] = []

        def drain() -> None:
            for each in SIGNALS:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)  # the next one ends the process at once
            drains.append(loop.create_task(lifecycle.drain()))

        for each in SIGNALS:
            loop.add_signal_handler(each, drain)
        loop.add_signal_handler(signal.SIGHUP, lifecycle.keys.reload)
        host, port = listener.getsockname()[:2]
        announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await server.serve(sockets=[listener])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    return lifecycle.exit_status()


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        # Python adds the address, which the message has already.
        said = reason(error).partition(" (while attempting")[0]
        is_foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        advice = "host should be an address of this machine" if is_foreign else "choose another port"
        raise ConfigError(f"the server cannot listen on {settings.host}:{settings.port}: {said}; {advice}") from None
