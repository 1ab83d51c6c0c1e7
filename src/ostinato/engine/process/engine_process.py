"""The engine's process as the server sees it: started, connected by messages, and ended."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ostinato.child_process import SECRET_VARIABLES as SECRET_VARIABLES
from ostinato.child_process import child_environment as child_environment
from ostinato.child_process import start_bound_process
from ostinato.config import EngineConfig
from ostinato.engine.process.engine_messages import (
    EngineCrashed,
    EngineStart,
    EngineStarted,
    LogLine,
    MessageDecoder,
    ProgressReport,
    encode_message,
)
from ostinato.errors import CapacityError, EngineError, ModelError
from ostinato.formats.mapped_files import truncated_file_message
from ostinato.kv_cache.offload.save_restore import SAVE_PATIENCE
from ostinato.observe.counts import ProgressFn
from ostinato.os_support import address_space_hint

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore


_PATIENCE = 5.0
"""Seconds that a process has to end after its connection has ended; then it is killed."""


_THRESHOLD = 10_000
"""New objects until the garbage collector runs.

Python's default of 700 is reached within one request, whose objects nearly all go without the collector.
"""


def make_engine(config: EngineConfig, progress: ProgressFn) -> EngineCore:
    """Return the engine of a configuration; see `EngineCore`. Imports torch."""
    from ostinato.engine.core import EngineCore

    return EngineCore(config, progress)


class EngineProcess(asyncio.Protocol):
    """A process that runs one engine. It ends with its connection, and so with the process that started it."""

    started: EngineStarted
    """First report of the process."""

    def __init__(self, progress: ProgressFn) -> None:
        self._progress = progress
        self._unpacker = MessageDecoder()
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Future[EngineStarted] = self._loop.create_future()
        self._transport: asyncio.Transport
        self._process: subprocess.Popen[bytes]
        self._reaping: asyncio.Task[None] | None = None
        self._has_ended = False
        self._owner = os.getpid()
        self._model = ""
        self.on_message: Callable[[object], None] = lambda message: None
        """Callback on the loop for the engine's messages after it has started."""
        self.on_end: Callable[[Exception], None] = lambda error: None
        """Callback on the loop, called once, when the engine has failed or its process died."""

    @classmethod
    async def start(cls, start: EngineStart, progress: ProgressFn) -> EngineProcess:
        """Return a process whose engine has succeeded in a step.

        Raises the error of an engine that cannot be made, and EngineError if the process died. A cancelled call leaves
        nothing behind.
        """
        process = cls(progress)
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            transport, _ = await process._loop.create_unix_connection(lambda: process, sock=parent_socket)
            process._transport = cast(asyncio.Transport, transport)
            process._process = _spawn(child_socket)
        process._model = start.config.model
        atexit.register(process._abandon)
        try:
            process.send(start)
            process.started = await process._starting
        except BaseException:
            await asyncio.shield(process.end())
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Send a message, without waiting. Messages after the end are dropped."""
        if not self._transport.is_closing():
            self._transport.write(encode_message(message))

    async def end(self) -> None:
        """End the process, whatever it is doing."""
        self._has_ended = True
        atexit.unregister(self._abandon)
        self._transport.abort()
        await asyncio.to_thread(self._reap)

    def _abandon(self) -> None:
        """End the process at the exit of this one, which did not. It saves its prefix cache first."""
        if os.getpid() == self._owner:  # not in a fork
            with contextlib.suppress(OSError):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._reap(SAVE_PATIENCE + _PATIENCE)

    def _reap(self, patience: float = _PATIENCE) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience)
        self._process.kill()
        return self._process.wait()

    # Methods of asyncio.Protocol.

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            match message:
                case LogLine(record):
                    logger = logging.getLogger(record.name)
                    if logger.isEnabledFor(record.levelno):
                        logger.handle(record)
                case ProgressReport():
                    self._progress(*message)
                case EngineStarted():
                    self._starting.set_result(message)
                case EngineCrashed(error):
                    self._fail(error)
                case _:
                    self.on_message(message)

    def connection_lost(self, _: Exception | None) -> None:
        if not self._has_ended:
            self._reaping = self._loop.create_task(self._note_death())

    async def _note_death(self) -> None:
        status = await asyncio.to_thread(self._reap)
        self._fail(process_death_error(status, self._model))

    def _fail(self, error: Exception) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if not self._starting.done():
            self._starting.set_exception(error)
        else:
            self.on_end(error)


def process_death_error(status: int, model: str) -> Exception:
    """Return why a process ended by itself with `status`, as far as that can be known. `model` is its model."""
    how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    if status == -signal.SIGBUS:
        return ModelError(f"the engine's process ended {how}: {truncated_file_message(model)}")
    hint = None if status == -signal.SIGKILL else address_space_hint()
    if hint is not None:
        return CapacityError(f"the engine's process ended {how}: {hint}")
    return EngineError(f"the engine's process ended {how}")


def _spawn(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process at the end of `connection`."""
    command = [sys.executable, "-P", "-m", "ostinato.engine.process.child", str(connection.fileno())]
    environment = child_environment()
    # The child inherits blocked signals, so none reaches it before it ignores them.
    saved_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        if threading.current_thread() is not threading.main_thread():
            return start_bound_process(command, environment, [connection.fileno()])
        return subprocess.Popen(command, pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, saved_mask)


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection, and make the collector run seldom.

    A process that is ready holds some hundred thousand objects until it ends. A look through them takes a tenth of a
    second, in which no request makes progress.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
