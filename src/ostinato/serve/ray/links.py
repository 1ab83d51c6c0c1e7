"""A front's engine over the replicas of a Ray application: its links to them, and the search for new ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ostinato.config import EngineConfig
from ostinato.replicas.front import ReplicaSet
from ostinato.replicas.replica_messages import PING_SECONDS
from ostinato.replicas.replicated_engine import ReplicatedEngine
from ostinato.serve.ray.layout import NAMESPACE, actor_prefix
from ostinato.serve.settings import ServeSettings

log = logging.getLogger("ostinato.replicas")

LOOK_SECONDS = 0.5
"""Seconds between two looks for new engines."""


class RayLink:
    """Link to an engine's actor. Messages wait while it takes others: all arrive in order, and bursts as one call."""

    def __init__(self, name: str, actor: Any, front: str) -> None:
        self.name, self._actor, self._front = name, actor, front
        self.on_messages: Callable[[Sequence[object]], None] = lambda messages: None
        self.on_lost: Callable[[], None] = lambda: None
        self._waiting: list[object] = []
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._receiving = loop.create_task(self._receive())
        self._sending: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self._receiving.done()

    def send(self, message: Any) -> None:
        self._waiting.append(message)
        self._news.set()

    def close(self) -> None:
        if not self._receiving.done():
            self._receiving.cancel()
            self._actor.leave.remote(self._front)
        self._stop_sending()

    async def _receive(self) -> None:
        try:
            async for given in self._actor.messages.options(num_returns="streaming").remote(self._front):
                if self._sending is None:
                    self._sending = asyncio.get_running_loop().create_task(self._send())
                self.on_messages(pickle.loads(await given))
        except RayError as error:
            log.info("replica %s: %s", self.name, _first_line(error))
        self._stop_sending()
        self.on_lost()

    async def _send(self) -> None:
        with contextlib.suppress(RayError):  # ends the other direction too
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), PING_SECONDS)
                self._news.clear()
                waiting, self._waiting = self._waiting, []
                await self._actor.take.remote(self._front, pickle.dumps(waiting, pickle.HIGHEST_PROTOCOL))

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()


class ReplicaDiscovery:
    """Finder that links `replicas` to the engines of an application, as they come."""

    def __init__(self, app: str, front: str, replicas: ReplicaSet) -> None:
        """Begin to look for engines; `front` is a name that no other front has."""
        self._prefix, self._front, self._replicas = actor_prefix(app), front, replicas
        self._links: dict[str, RayLink] = {}
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                names = await asyncio.to_thread(self._names)
                for name in names - self._links.keys():
                    # Look by name: an actor that has just died is no longer found.
                    with contextlib.suppress(ValueError):
                        self._link(name, await asyncio.to_thread(ray.get_actor, name, NAMESPACE))
            except RayError as error:
                log.warning("Ray does not say which engines there are: %s", _first_line(error))
            for name in [name for name, link in self._links.items() if link.has_ended and name not in names]:
                del self._links[name]
            await asyncio.sleep(LOOK_SECONDS)

    def _names(self) -> set[str]:
        found = ray.util.list_named_actors(all_namespaces=True)
        return {
            each["name"] for each in found if each["namespace"] == NAMESPACE and each["name"].startswith(self._prefix)
        }

    def _link(self, name: str, actor: object) -> None:
        link = self._links[name] = RayLink(name.removeprefix(self._prefix), actor, self._front)
        self._replicas.add(link)


def _first_line(error: Exception) -> str:
    error = getattr(error, "cause", None) or error
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


async def start_over(
    app: str,
    config: EngineConfig,
    settings: ServeSettings,
    *,
    max_waiting: int,
    max_per_client: Callable[[int], int | None],
    seed: int | None = None,
    on_close: Callable[[], Awaitable[None]] | None = None,
    on_made: Callable[[ReplicaSet], None] = lambda replicas: None,
) -> ReplicatedEngine:
    """Wait for the first replica of `app`, and return the engine over its replicas.

    `on_made` receives the `ReplicaSet` that they are linked to; `on_close` is called at the end, when no link is left.
    """

    async def close() -> None:
        await finder.stop()
        if on_close is not None:
            await on_close()

    replicas = ReplicaSet(settings.routing, close)
    finder = ReplicaDiscovery(app, secrets.token_hex(4), replicas)
    on_made(replicas)

    def share(max_num_seqs: int) -> int | None:
        return max_per_client(max_num_seqs * settings.most_replicas)

    return await ReplicatedEngine.over(replicas, config, max_waiting=max_waiting, max_per_client=share, seed=seed)
