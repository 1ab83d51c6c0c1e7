"""A server for tests: the real application on a free loopback port, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
import openai
import uvicorn

from ostinato.config import EngineConfig
from ostinato.replicas.router import RoutingPolicy
from ostinato.serve.app import make_app
from ostinato.serve.http.connection import HttpConnection
from ostinato.serve.http.lifecycle import Lifecycle, ServerLifecycle
from ostinato.serve.route.proxy import RouteLifecycle, RouteSettings, make_route_app
from ostinato.serve.settings import ServeSettings
from tests.support.engine_probe import Probe, without_native_kernels
from tests.support.patience import PATIENCE

UNHURRIED = {"worker_seconds": PATIENCE, "client_seconds": PATIENCE}
"""Limits of time, which count what other processes of the machine take too."""


@dataclass
class Served:
    """A running server. `lifecycle` is the loop's own: look, and act through `on_loop`."""

    url: str
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop
    probe: Probe
    """For faults in its engine."""
    server: uvicorn.Server

    @property
    def engine(self) -> Any:
        return self.lifecycle.engine

    def client(self) -> openai.OpenAI:
        """A client of OpenAI's, which asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stats(self) -> dict[str, Any]:
        """The engine's, between two steps."""
        return self.on_loop(self.engine.observe()).stats

    def num_connections(self) -> int:
        """Those of clients that the server has open."""
        return len(self.server.server_state.connections)

    def num_kept(self) -> int:
        """For how many requests the engine keeps anything, between two steps."""
        return self.on_loop(self.engine.check_integrity()) + self.stats()["kept"]

    def on_loop(self, coroutine: Any, timeout: float = PATIENCE) -> Any:
        """Runs a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def unfinished(self, count: int) -> None:
        """Waits until so many requests are unfinished, and the engine has been told of each."""
        self.until(lambda: self.engine.num_unfinished == count)
        self.on_loop(asyncio.sleep(0))

    def until(self, condition: Any, timeout: float = PATIENCE) -> None:
        """Waits until `condition()` holds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "what was waited for did not happen"
            time.sleep(0.01)


@contextmanager
def serving(serve: dict[str, Any] | None = None, *, wait: bool = True, **settings: Any) -> Iterator[Served]:
    """A server of the embedded model, in float32 on one thread unless `settings` say otherwise."""
    config = EngineConfig(**{"model": "demo", "dtype": "float32", "threads": 1, **settings})
    probe = Probe(reference=without_native_kernels())
    lifecycle = Lifecycle(config, ServeSettings(**{"port": 0, **UNHURRIED, **(serve or {})}), make=probe)
    with in_thread(make_app(lifecycle), lifecycle) as (url, loop, server):
        served = Served(url, lifecycle, loop, probe, server)
        try:
            if wait:
                served.until(lambda: lifecycle.status != "starting")
                assert lifecycle.error is None, lifecycle.error
            yield served
        finally:
            server.should_exit = True
            probe.close()


@dataclass
class Routed:
    """A running router."""

    url: str
    lifecycle: RouteLifecycle
    server: uvicorn.Server

    def backends(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx2.get(f"{self.url}/backends", timeout=PATIENCE).json()["backends"]
        return found

    def until(self, condition: Any, timeout: float = PATIENCE) -> None:
        """Waits until `condition()` holds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "what was waited for did not happen"
            time.sleep(0.01)


@contextmanager
def routing(
    urls: Sequence[str],
    *,
    num_ready: int | None = None,
    key: str | None = None,
    ext_proc: str | None = None,
    policy: RoutingPolicy = "prefix",
    **serve: Any,
) -> Iterator[Routed]:
    """A router in front of servers; waits until `num_ready` (open: all) are ready and have told what they cached."""
    route = RouteSettings(tuple(urls), None, key, policy, ext_proc)
    lifecycle = RouteLifecycle(ServeSettings(**{"port": 0, **UNHURRIED, **serve}), route)
    with in_thread(make_route_app(lifecycle), lifecycle) as (url, _, server):
        routed = Routed(url, lifecycle, server)
        most = len(urls) if num_ready is None else num_ready
        routed.until(lambda: sum(each.has_events for each in lifecycle.pool.backends.values()) >= most)
        yield routed


@contextmanager
def in_thread(app: Any, lifecycle: ServerLifecycle) -> Iterator[tuple[str, asyncio.AbstractEventLoop, uvicorn.Server]]:
    """An application on a free port, its loop, and its server."""
    http: Any = partial(HttpConnection, occupancy=lifecycle.occupancy)
    web = uvicorn.Config(app, host="127.0.0.1", port=0, http=http, log_config=None)
    server = uvicorn.Server(web)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it started"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    lifecycle.on_end = lambda: setattr(server, "should_exit", True)
    try:
        yield f"http://127.0.0.1:{port}", loops[0], server
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


def events(response: httpx2.Response) -> list[str]:
    """The data of each server-sent event of a response."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
