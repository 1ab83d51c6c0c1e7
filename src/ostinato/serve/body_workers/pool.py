"""Worker processes that read large bodies, used from the event loop.

They are few, are shared fairly, and are limited in time, memory and budgets. A client's budgets are seconds and pixels,
per minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import pickle
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ostinato.child_process import start_bound_process
from ostinato.engine.process.engine_messages import encode_message
from ostinato.engine.process.engine_process import child_environment
from ostinato.errors import os_error_text
from ostinato.scheduler.request_queues import FairShare, weighted_share
from ostinato.serve.body_workers.context import WorkerContext
from ostinato.serve.body_workers.forkserver import BodyJob, BodyResult
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.json_bodies import Body

WINDOW = 60.0
"""Seconds in which a whole budget comes back."""
MAX_CLIENTS = 1024
"""Largest number of clients; beyond it, those that have used least are forgotten."""


@dataclass(slots=True)
class _Use:
    seconds: float = 0.0
    pixels: float = 0.0
    since: float = 0.0


class ClientQuota:
    """Use of each client, as leaky buckets.

    A client may use a whole budget at once, and gets it back within `WINDOW`. What it uses is known afterwards, so the
    last request may exceed the budget, and the next ones wait.
    """

    def __init__(self, seconds: float, pixels: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._pixels, self._clock = seconds, pixels, clock
        self._uses: dict[str, _Use] = {}

    def check(self, client: str) -> None:
        """Raise ApiError 429 for a client that has used all it may."""
        use = self._leaked(client)
        if use is None:
            return
        over = max(use.seconds / self._seconds, use.pixels / self._pixels) - 1
        if over < 0:
            return
        name, most = "client_pixels", f"{self._pixels} pixels"
        if use.seconds / self._seconds > use.pixels / self._pixels:
            name, most = "client_seconds", f"{self._seconds:g} seconds"
        retry = {"Retry-After": str(max(1, math.ceil(over * WINDOW)))}
        message = f"large bodies and images of this client have taken more than {most} within a minute ({name})"
        raise ApiError(429, message, code="client_budget", headers=retry)

    def charge(self, client: str, seconds: float, pixels: int) -> None:
        """Add to what a client has used."""
        use = self._leaked(client) or self._uses.setdefault(client, _Use(since=self._clock()))
        use.seconds += seconds
        use.pixels += pixels
        if len(self._uses) > MAX_CLIENTS:
            by_use = sorted(self._uses, key=self._share)
            for each in by_use[: MAX_CLIENTS // 2]:
                del self._uses[each]

    def _leaked(self, client: str) -> _Use | None:
        use = self._uses.get(client)
        if use is None:
            return None
        now = self._clock()
        back = (now - use.since) / WINDOW
        use.seconds, use.pixels = (
            max(0.0, use.seconds - back * self._seconds),
            max(0.0, use.pixels - back * self._pixels),
        )
        use.since = now
        return use

    def _share(self, client: str) -> float:
        use = self._leaked(client)
        assert use is not None, "a client of those that are known"
        return max(use.seconds / self._seconds, use.pixels / self._pixels)


log = logging.getLogger("ostinato.serve")

MAX_WAITING = 64
"""Largest number of requests that wait for a worker; more get status 429."""
_LARGE = 2**20
"""Bytes after which a worker is not used again, as after an image, since it keeps its memory otherwise."""
_PIECE = 2**18
"""Bytes handed to a worker at a time."""
_POLL_SECONDS = 0.05
"""Time between two looks for a fork server that is not to start any more."""

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BodyWorkerPool:
    """Pool of worker processes that read bodies. Every method is called on one event loop."""

    def __init__(self, context: WorkerContext) -> None:
        settings = context.settings
        self._context = context
        self._seconds = settings.worker_seconds
        self._budgets = ClientQuota(settings.client_seconds, settings.client_pixels)
        self._free = self._count = settings.body_workers
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._of_client: Counter[str] = Counter()
        """Waiting requests of each client."""
        self._numbers = itertools.count()
        self._fair_share = FairShare()
        self._idle: list[_Connection] = []
        self._forkserver: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._starting: asyncio.Future[tuple[subprocess.Popen[bytes], socket.socket]] | None = None
        self._connections: list[socket.socket] = []
        """Connections to fork servers that are not ready."""
        self.num_done = self.num_ended_early = 0
        """Jobs that a worker has finished, and those that were stopped: the client left, or the time was over."""

    def start(self) -> None:
        """Start the fork server in the background: the first guide, image or large body would wait seconds for it.

        Nothing happens if it has begun, as with a router's request that came first.
        """
        if self._forkserver is not None or self._starting is not None:
            return
        self._starting = asyncio.ensure_future(asyncio.to_thread(_start_forkserver, self._context, self._connections))
        self._starting.add_done_callback(self._forget_failure)

    def _forget_failure(self, starting: asyncio.Future[tuple[subprocess.Popen[bytes], socket.socket]]) -> None:
        """Let the next request start the fork server again, if it has not started; that request gets the error."""
        if not starting.cancelled() and starting.exception() is not None and self._starting is starting:
            self._starting = None

    @property
    def num_running(self) -> int:
        """Jobs that workers are doing."""
        return self._count - self._free

    async def read(self, client: str, kind: type[Body], sent: bytes) -> tuple[Body, Any]:
        """Have a worker read a body; return the slim body, and the result of `Body.prepare`.

        Raises what that raises; ApiError 429 if too many wait or the client has used up its budget, 400 if it takes too
        long or too much memory. Cancelled, it ends the worker.
        """
        self._budgets.check(client)
        async with self._worker_slot(client):
            begin = time.monotonic()
            done = None
            try:
                async with asyncio.timeout(self._seconds):
                    done = await self._by_worker(kind, sent)
            except TimeoutError:
                most = f"{self._seconds:g} seconds (worker_seconds)"
                message = f"reading the request took longer than {most}; make it smaller, or its images"
                raise ApiError(400, message, code="too_costly") from None
            finally:
                self.num_ended_early += done is None
                self._budgets.charge(client, time.monotonic() - begin, 0 if done is None else done.pixels)
        self.num_done += 1
        if done.error is not None:
            try:
                raise done.error
            finally:
                del done  # its traceback refers back here, and would keep the body for a while
        assert done.body is not None, "without an error there is a body"
        return done.body, done.prepared

    @asynccontextmanager
    async def _worker_slot(self, client: str) -> AsyncIterator[None]:
        """Reserve a worker's time. Clients get fair shares."""
        if self._free:
            self._free -= 1
        else:
            share = weighted_share(MAX_WAITING // 4, MAX_WAITING, client)
            if len(self._waiting) >= MAX_WAITING or self._of_client[client] >= share:
                message = f"{len(self._waiting)} requests with large bodies or images wait already"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (self._fair_share.assign(client), next(self._numbers), future))
            self._of_client[client] += 1
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._next()  # its slot was just granted
                raise
            finally:
                self._of_client[client] -= 1
                if not self._of_client[client]:
                    del self._of_client[client]
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            turn, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self._fair_share.advance(turn)
                future.set_result(None)
                return
        self._free += 1

    async def _by_worker(self, kind: type[Body], sent: bytes) -> BodyResult:
        """Have a worker read a body, and a new one if that ends before it answers: reading changes nothing."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            return await self._read_by(await self._connection(), kind, sent)
        try:
            return await self._read_by(await self._connection(is_new=True), kind, sent)
        except (OSError, asyncio.IncompleteReadError):
            message = "two processes that read the request ended, perhaps for want of memory; make the request smaller"
            raise ApiError(500, message, code="worker_ended") from None

    async def _connection(self, is_new: bool = False) -> _Connection:
        while self._idle and not is_new:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.transport.abort()
        try:
            return await self._new()
        except OSError as error:
            message = f"no process can be started to read the request: {os_error_text(error)}"
            raise ApiError(503, message, code="no_worker", headers={"Retry-After": "5"}) from None

    async def _read_by(self, connection: _Connection, kind: type[Body], sent: bytes) -> BodyResult:
        reader, writer = connection
        is_kept = False
        try:
            writer.write(encode_message(BodyJob(kind, len(sent))))
            for begin in range(0, len(sent), _PIECE):
                writer.write(memoryview(sent)[begin : begin + _PIECE])
                await writer.drain()
            size = int.from_bytes(await reader.readexactly(8), "little")
            done: BodyResult = pickle.loads(await reader.readexactly(size))
            is_kept = len(sent) <= _LARGE and not done.pixels
            return done
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                writer.transport.abort()  # ends the worker, whatever it is doing

    async def _new(self) -> _Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):  # the fork server may have died
                forkserver = await self._started()
                try:
                    socket.send_fds(forkserver, [b"w"], [theirs.fileno()])
                    break
                except OSError:
                    self._end_forkserver()
            else:
                ours.close()
                raise ApiError(500, "no process can be started to read the request", code="no_worker")
        return await asyncio.open_unix_connection(sock=ours, limit=2**20)

    async def _started(self) -> socket.socket:
        if self._forkserver is None:
            self.start()
            assert self._starting is not None, "it has begun"
            starting = self._starting
            try:
                # It continues for others if this request's client leaves.
                self._forkserver = await asyncio.shield(starting)
            finally:
                if starting.done() and self._starting is starting:
                    self._starting = None
        return self._forkserver[1]

    def _end_forkserver(self) -> None:
        if self._forkserver is not None:
            process, connection = self._forkserver
            self._forkserver = None
            connection.close()
            process.kill()
            process.wait()

    async def stop(self) -> None:
        """End all processes."""
        if (starting := self._starting) is not None:
            while not starting.done():
                for connection in tuple(self._connections):
                    with contextlib.suppress(OSError):  # it has ended
                        connection.shutdown(socket.SHUT_RDWR)
                await asyncio.wait((starting,), timeout=_POLL_SECONDS)
            with contextlib.suppress(RuntimeError, OSError):  # it has not started
                self._forkserver = starting.result()
            self._starting = None
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()
        self._end_forkserver()


def _start_forkserver(
    context: WorkerContext, connections: list[socket.socket]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that workers are forked from. RuntimeError if it cannot start.

    Its connection is among the `connections` until it is ready. If that is shut down, the process ends.
    """
    ours, theirs = socket.socketpair()
    connections.append(ours)
    # Forked processes have no use for threads, which a fork does not copy.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # The thread that tries a guide would get an arena of its own, whose addresses count as memory from then on.
    environment = {**child_environment(), **single, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-P", "-m", "ostinato.serve.body_workers.forkserver", str(theirs.fileno())]
    try:
        with theirs:
            process = start_bound_process(command, environment, [theirs.fileno()])
        with contextlib.suppress(OSError):
            ours.sendall(encode_message(context))
            file = ours.makefile("rb")
            size = file.read(8)
            if size:
                error = pickle.loads(file.read(int.from_bytes(size, "little")))
                if error is None:
                    return process, ours
                log.error("large bodies cannot be read: %s", error)
    finally:
        connections.remove(ours)
    ours.close()
    process.kill()
    process.wait()
    raise RuntimeError("the process that workers are forked from has not started")
