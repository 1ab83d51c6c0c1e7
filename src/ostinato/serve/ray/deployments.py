"""The application on Ray Serve: engine deployments, and on clusters ingress deployments too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.types import ASGIApp

from ostinato.config import EngineConfig
from ostinato.json_io import JsonObject
from ostinato.observe.logs import configure_logs
from ostinato.serve.app import make_app
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.ray.actor import EngineActor, ReplicaSettings
from ostinato.serve.ray.layout import NAMESPACE, actor_prefix
from ostinato.serve.ray.links import start_over
from ostinato.serve.settings import ServeSettings

CONCURRENCY = 10_000
"""Calls of an actor at a time: a stream for each front, and short ones."""


class EngineDeployment:
    """Deployment that manages one engine: its health, its load and its end.

    The engine itself is in a separate actor, which fronts talk to without Ray Serve between them.
    """

    # Ray Serve awaits it.
    async def __init__(self, app: str, engine: JsonObject, settings: ReplicaSettings) -> None:  # type: ignore[misc]
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(EngineActor).options(
            name=f"{actor_prefix(app)}{secrets.token_hex(4)}",
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy=here,
        )
        self._actor: Any = actor.remote(engine, settings, os.environ.get("CUDA_VISIBLE_DEVICES"))
        await self._actor.start.remote()
        self._watching = asyncio.create_task(self._end_with_engine())

    async def check_health(self) -> None:
        """Raise unless the engine works."""
        await self._actor.load.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._actor.load.remote()

    async def __del__(self) -> None:
        self._watching.cancel()
        with contextlib.suppress(RayError):  # it has ended already
            await self._actor.drain.remote()

    async def _end_with_engine(self) -> None:
        """End this replica at once when its engine has: Ray Serve then starts another."""
        with contextlib.suppress(RayError):
            await self._actor.last.remote()
        os._exit(1)


def engine_deployment(**options: object) -> serve.Deployment:
    """Return the engine deployment; `options` are those of a deployment."""
    return _deployment(EngineDeployment, "Engine", **options)


def _deployment(kind: Any, name: str, **options: Any) -> serve.Deployment:
    deployment: Any = serve.deployment(kind, name=name, **options)
    return deployment


def build(args: JsonObject) -> serve.Application:
    """Build the application of a Serve config file from its `args`: `name`, `engine` and `server`.

    The latter two are the settings of EngineConfig and of ServeSettings. Numbers of replicas and resources are in the
    file itself.
    """
    server = ServeSettings(**args["server"])
    settings = replica_settings(server)
    engines = engine_deployment().bind(args["name"], args["engine"], settings)
    app = partial(_ingress_app, args["name"], args["engine"], args["server"])
    ingress: Any = serve.ingress(_as_function(app))
    return _deployment(ingress(_Ingress), "Ingress").bind(engines)


def replica_settings(server: ServeSettings) -> ReplicaSettings:
    """Return the server's settings that hold for engines."""
    return ReplicaSettings(server.engine_timeout, server.drain_timeout, server.log_level, server.log_format)


class _Ingress:
    """HTTP's side of the application: middleware, endpoints and page of `ostinato serve`."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines  # named here so that they belong to one application


def _as_function(make: partial[ASGIApp]) -> Any:
    def builder() -> ASGIApp:
        return make()

    return builder


def _ingress_app(name: str, engine: JsonObject, server: JsonObject) -> ASGIApp:
    settings = ServeSettings(**server)
    configure_logs(settings.log_format, settings.log_level, access=settings.access_log)
    # Requests without a seed get theirs from the ingress: each has its own.
    start = partial(start_over, name, EngineConfig(**engine), settings, seed=secrets.randbits(63))
    return make_app(Lifecycle(EngineConfig(**engine), settings, start_engine=start))
