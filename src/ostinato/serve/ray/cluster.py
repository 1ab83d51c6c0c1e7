"""`ostinato serve --replicas`: a Ray, the engines on it, and this process as their front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ostinato.child_process import SECRET_VARIABLES
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, EngineError, Remedy
from ostinato.files import exists, home
from ostinato.observe.counts import ProgressFn
from ostinato.os_support import extra_command
from ostinato.replicas.front import ReplicaSet
from ostinato.replicas.replicated_engine import ReplicatedEngine
from ostinato.serve.http.addresses import split_host_port
from ostinato.serve.ray.layout import NAMESPACE, ReplicaLayout, app_name, count_gpus, deployment_options, lay_out
from ostinato.serve.settings import ServeSettings

log = logging.getLogger("ostinato.replicas")

OBJECT_STORE = 100 * 2**20
"""Bytes of Ray's object store on this machine: ours are pieces of requests that migrate."""

CONNECT_SECONDS = 10
"""Seconds that a running Ray may take to accept a connection."""

_RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}
"""Variables for Ray, set unless the environment sets them.

Ray then sends no usage statistics, a busy machine has time to start Ray, a late call at the end connects to no other
Ray, and a process that is asked to end (SIGTERM) prints no stack of C++, as if it had crashed.
"""


def check_installed() -> None:
    """Raise ConfigError if ray is not installed."""
    if find_spec("ray") is None:
        message = f"replicas run on Ray Serve, which is not installed: {extra_command('ray')}"
        raise ConfigError(message, [Remedy("replicas", None), Remedy("ray_address", None)])


def has_token(folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether there is a token for a Ray that asks for one, in one of Ray's places for it."""
    is_named = "RAY_AUTH_TOKEN" in environ or "RAY_AUTH_TOKEN_PATH" in environ
    return is_named or exists((folder or home()) / ".ray" / "auth_token")


def check_reachable(address: str) -> None:
    """Raise ConfigError if nothing listens at HOST:PORT, where Ray would wait for ever. Other forms pass."""
    host, port = split_host_port(address.removeprefix("ray://"))
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> ConfigError:
    message = (
        f"no Ray can be reached at {address}: {str(error).partition(chr(10))[0]}; this should be one of its nodes, "
        "with its token in ~/.ray/auth_token if it asks for one"
    )
    return ConfigError(message, [Remedy("ray_address", None)])


class ReplicatedServer:
    """Engines of one server on a Ray. They are planned on construction: ConfigError or CapacityError then."""

    def __init__(self, config: EngineConfig, settings: ServeSettings, model_name: str, progress: ProgressFn) -> None:
        check_installed()
        local = settings.ray_address is None
        self.layout: ReplicaLayout = lay_out(config, settings.most_replicas, local, num_gpus=count_gpus())
        self._settings, self._progress = settings, progress
        self._app = app_name(model_name)
        self._deploying: asyncio.Task[None] | None = None

    async def start(self, *, max_waiting: int, max_per_client: Callable[[int], int | None]) -> ReplicatedEngine:
        """Start or join the Ray, deploy the engines, and wait for the first one.

        ConfigError if the cluster has no room for them, EngineError with Ray's message if they cannot start. See
        `AsyncEngine.start`.
        """
        self._progress("Starting Ray", 0, 1)
        await asyncio.to_thread(self._connect)
        from ostinato.serve.ray.links import start_over  # imports ray

        count = self._settings.replicas or 1
        self._progress("Starting replicas", 0, count)
        return await start_over(
            self._app,
            self.layout.config,
            self._settings,
            max_waiting=max_waiting,
            max_per_client=max_per_client,
            on_close=self._close,
            on_made=self._deploy,
        )

    def _connect(self) -> None:
        for name, value in _RAY_VARIABLES.items():
            os.environ.setdefault(name, value)  # some are read when ray is imported
        if self._settings.ray_address is not None and has_token():
            # Ray itself shows its token to a cluster only where this is set, and reads that when it is imported.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray
        from ray import serve

        address, layout = self._settings.ray_address, self.layout
        with _without_secrets():
            if address is None:
                cores = max(os.cpu_count() or 1, layout.num_cpus * self._settings.most_replicas)
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    # One more for Ray Serve's own processes.
                    num_cpus=cores + 1,
                    num_gpus=layout.num_gpus * self._settings.most_replicas,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE,
                    logging_level=logging.WARNING,
                )
            else:
                check_reachable(address)
                try:
                    ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
                except ConnectionError as error:
                    raise _unreachable(address, error) from None
                self._check_room(ray.cluster_resources())
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})

    def _check_room(self, there_is: dict[str, float]) -> None:
        layout, count = self.layout, self._settings.replicas or 1
        for kind, name, each in (("CPU", "cores", layout.num_cpus), ("GPU", "GPUs", layout.num_gpus)):
            found = int(there_is.get(kind, 0))
            if count * each > found:
                import ray

                ray.shutdown()
                fitting = [Remedy("replicas", found // each)] if found >= each else []
                more = [Remedy("threads", found // count)] if kind == "CPU" and found >= count else []
                raise ConfigError(
                    f"{count} replicas of {each} {name} each need {count * each}, and the cluster has {found}",
                    [*fitting, *more],
                )

    def _deploy(self, replicas: ReplicaSet) -> None:
        self._deploying = asyncio.get_running_loop().create_task(self._deploying_of(replicas))

    async def _deploying_of(self, replicas: ReplicaSet) -> None:
        from ray import serve

        from ostinato.serve.ray.deployments import engine_deployment, replica_settings

        options = deployment_options(self.layout, self._settings)
        engines = engine_deployment(**options).bind(
            self._app, self.layout.engine_settings, replica_settings(self._settings)
        )
        run = partial(serve.run, engines, name=self._app, route_prefix=None)
        try:
            await asyncio.to_thread(run)
        except Exception as error:
            why = await asyncio.to_thread(self._why)
            replicas.fail(EngineError(f"Ray Serve could not start the replicas: {why or error}"))
        else:
            log.info("Ray Serve runs %s", self._app)

    def _why(self) -> str:
        """Return the last line of Ray Serve's report of a failure: the error that its own error came from."""
        from ray import serve

        with contextlib.suppress(Exception):  # then only the error itself is reported
            application = serve.status().applications[self._app]
            lines = [line for each in application.deployments.values() for line in each.message.splitlines()]
            return next((line for line in reversed(lines) if "Error: " in line), "").strip()
        return ""

    async def _close(self) -> None:
        if self._deploying is not None:
            self._deploying.cancel()
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        import ray
        from ray import serve

        with contextlib.suppress(Exception):  # it ends in any case
            serve.delete(self._app)
        if self._settings.ray_address is None:
            with contextlib.suppress(Exception):
                serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def _without_secrets() -> Iterator[None]:
    """Hide keys from processes that start meanwhile: Ray's own and its workers copy the environment then."""
    found = {name: os.environ.pop(name) for name in SECRET_VARIABLES.values() if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(found)
