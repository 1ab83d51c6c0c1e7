"""A front's engine over the replicas of an application that runs on Ray."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from ostinato.config import EngineConfig
from ostinato.engine.replicas.front import ReplicaSet
from ostinato.engine.replicas.replicated_engine import ReplicatedEngine
from ostinato.serve.replicas.links import ReplicaDiscovery
from ostinato.serve.settings import ServeSettings


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
