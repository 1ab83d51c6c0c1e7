"""The process: its socket, its signals, and the status it exits with."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from ostinato.config import EngineConfig
from ostinato.engine.runner import StartProgress
from ostinato.errors import ConfigError
from ostinato.serve.app import make_app
from ostinato.serve.life import Life
from ostinato.serve.settings import ServeSettings


class _Server(uvicorn.Server):
    """uvicorn's server, with signals left to Life: it is to answer while it drains."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: EngineConfig,
    settings: ServeSettings,
    progress: StartProgress,
    announce: Callable[[str], None],
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine fails; returns the process's exit status.

    `announce` gets the server's URL once it listens. Raises ConfigError if it cannot, and what the engine raises when
    it cannot start.
    """
    listener = _listen(settings)
    life = Life(config, settings, progress)
    server = _Server(
        uvicorn.Config(make_app(life), log_config=None, access_log=False, server_header=False, date_header=False)
    )
    life.on_end = lambda: setattr(server, "should_exit", True)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        drains: set[asyncio.Task[None]] = set()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, lambda: drains.add(loop.create_task(life.drain())))
        host, port = listener.getsockname()[:2]
        announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await server.serve(sockets=[listener])

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    return life.exit_status()


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"the server cannot listen on {where}: {error.strerror}; choose another port") from None
