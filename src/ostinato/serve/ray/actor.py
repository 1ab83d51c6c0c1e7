"""The actor that holds a replica's engine, and its messages from and to the fronts."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import ray
from ray.actor import ActorClass

from ostinato.config import EngineConfig
from ostinato.json_io import JsonObject
from ostinato.observe.logs import LogFormat, LogLevel, configure_logs
from ostinato.replicas.host import ReplicaHost
from ostinato.serve.ray.layout import NAMESPACE

log = logging.getLogger("ostinato.serve")

SEND_COST = 0.001
"""Seconds of a processor that Ray takes to deliver a message, at both ends."""


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of an engine on Ray besides its EngineConfig. Times are in seconds."""

    engine_timeout: float
    drain_timeout: float
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


class EngineActor:
    """Actor with one engine, on its event loop. Messages are pickled here, as Ray's serialisation takes longer."""

    _loop: asyncio.AbstractEventLoop | None = None
    """The actor's event loop, known once the engine is being started."""

    def __new__(cls, *_: object) -> EngineActor:
        # Ray makes the object on the main thread, which alone may set handlers, and calls __init__ on the loop's.
        actor = super().__new__(cls)
        if not issubclass(cls, ActorClass):  # a subclass is Ray's description of the actor
            signal.signal(signal.SIGTERM, lambda *_: actor._take_signal())
        return actor

    def __init__(self, engine: JsonObject, settings: ReplicaSettings, devices: str | None) -> None:
        """Prepare the process for its engine, without starting it.

        `engine`: the settings of its EngineConfig. `devices`: CUDA_VISIBLE_DEVICES for it.
        """
        configure_logs(settings.log_format, settings.log_level, access="none")
        # Ray sets threads and devices by the actor's own resources, and these are its deployment's.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._config, self._settings = EngineConfig(**engine), settings
        self._starting: asyncio.Task[ReplicaHost] | None = None
        self._ended = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model; raise the error if that fails."""
        await self._host()

    async def messages(self, front: str) -> AsyncIterator[bytes]:
        """Yield the messages to a front, from now on; see `ReplicaHost.messages`."""
        host = await self._host()
        async for messages in host.messages(front):
            yield pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)

    async def take(self, front: str, messages: bytes) -> None:
        """Accept messages from a front."""
        (await self._host()).take(front, pickle.loads(messages))

    async def leave(self, front: str) -> None:
        """Forget a front, which reports that it ends."""
        (await self._host()).leave(front)

    async def piece(self, request_id: str, offset: int) -> bytes:
        """Return to another replica some bytes of a request that migrates there. LookupError without any."""
        return (await self._host()).moves.departures.piece(request_id, offset)

    async def load(self) -> dict[str, float]:
        """Return the load, as shares of the capacity.

        `requests` is the share of those that may run, which may be above 1, and `slots` that of slots or blocks of the
        cache that requests hold. Raises RuntimeError if the engine has failed or does not answer.
        """
        host = await self._host()
        if host.failure is not None:
            raise RuntimeError(f"the engine has failed: {host.failure}")
        if host.is_stalled:
            raise RuntimeError(f"the engine has given no sign of life for {self._settings.engine_timeout:g} s")
        return host.load()

    async def drain(self) -> None:
        """Let requests migrate or end, and then end the engine."""
        if self._starting is None:
            return
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)

    async def last(self) -> None:
        """Wait until the engine has failed."""
        await self._ended.wait()

    async def pids(self) -> dict[str, int]:
        """Return the ids of the actor's process and of its engine's."""
        return {"actor": os.getpid(), "engine": (await self._host()).pid}

    def _take_signal(self) -> None:
        """Handle SIGTERM: end the process once its requests have migrated or ended."""
        if self._loop is None:
            os._exit(1)
        asyncio.run_coroutine_threadsafe(self._drain_and_exit(), self._loop)

    async def _drain_and_exit(self) -> None:
        try:
            await self.drain()
        except BaseException:
            log.exception("the replica could not be drained")
            os._exit(1)
        os._exit(0)  # the process that started it notices, and starts another

    async def _drain(self) -> None:
        host = await self._host()
        await host.drain(self._settings.drain_timeout)
        await host.end()

    async def _host(self) -> ReplicaHost:
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> ReplicaHost:
        settings = self._settings
        host = await ReplicaHost.start(
            self._config, _number(settings.log_level), settings.engine_timeout, send_cost=SEND_COST
        )
        host.on_failure = self._ended.set
        host.moves.fetch = _fetch
        return host


async def _fetch(source: str, request_id: str, offset: int) -> bytes:
    """Fetch bytes of a request from another actor, through Ray's object store, a piece at a time."""
    own = ray.get_runtime_context().get_actor_name() or ""
    actor = await asyncio.to_thread(ray.get_actor, f"{own.rpartition(':')[0]}:{source}", NAMESPACE)
    piece: bytes = await actor.piece.remote(request_id, offset)
    return piece


def _number(level: LogLevel) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
