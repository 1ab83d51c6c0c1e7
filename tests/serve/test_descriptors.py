"""File descriptors that run out: who is connected is served on, and the log and the metrics say what is wrong."""

from __future__ import annotations

import json
import resource
import socket
import time
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.os_support import max_open_files, raise_max_open_files
from ostinato.serve.http.connection_limits import RESERVED, fd_limited_connections, raise_fd_limit
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.listener import FIRST_FOR_ANYONE, free_port
from ostinato.serve.route.proxy import RouteLifecycle, RouteSettings
from ostinato.serve.settings import ServeSettings
from tests.support.patience import PATIENCE
from tests.support.server_process import RUN, Process

LIMIT = 200
# Something else in the process holds more than is reserved, so that connections alone fill the rest.
HOLDING = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range({RESERVED})]
{RUN}
"""


@pytest.fixture
def server():
    # However slow the machine, connections stay.
    process = Process("--header-timeout", "600", "--keep-alive-timeout", "600", code=HOLDING)
    yield process
    process.process.kill()
    process.status()


def ask(connection: HTTPConnection, path: str, body: bytes | None = None) -> tuple[int, str]:
    connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux counts descriptors there")
@pytest.mark.slow
def test_a_server_without_a_descriptor_says_so_serves_whom_it_has_and_recovers(server) -> None:
    host, _, port = server.ready().removeprefix("http://").partition(":")
    inside = HTTPConnection(host, int(port), timeout=PATIENCE)
    assert ask(inside, "/health")[0] == 200
    held = []
    try:
        while len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < LIMIT:
            held.append(socket.create_connection((host, int(port)), PATIENCE))
            time.sleep(0.001)
        server.until(lambda: any("no_file_descriptor" in line for line in server.lines))
        status, metrics = ask(inside, "/metrics")
        assert status == 200
        [count] = [line for line in metrics.splitlines() if 'reason="no_file_descriptor"' in line]
        assert float(count.split()[-1]) >= 1
        question = {"messages": [{"role": "user", "content": "2 + 2 ="}], "max_tokens": 2}
        assert ask(inside, "/v1/chat/completions", json.dumps(question).encode())[0] == 200
        status, told = ask(inside, "/v1/chat/completions", json.dumps({**question, "user": "x" * 20_000}).encode())
        assert (status, json.loads(told)["error"]["code"]) == (503, "no_worker")
        assert "Too many open files" in told
    finally:
        for each in held:
            each.close()

    def has_room() -> bool:
        try:
            return ask(HTTPConnection(host, int(port), timeout=PATIENCE), "/health")[0] == 200
        except OSError:
            return False

    server.until(has_room)
    status, _ = ask(inside, "/v1/chat/completions", json.dumps({**question, "user": "x" * 20_000}).encode())
    assert status == 200
    assert "Traceback" not in "".join(server.lines)


@pytest.fixture
def limit(monkeypatch):
    """The process's limits of descriptors, soft and hard, which a test may set."""
    limits = [100, 200]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(slice(None), pair))
    return limits


def test_more_connections_than_the_limit_has_room_for_raise_it_as_far_as_they_may(limit) -> None:
    raise_fd_limit(0)
    raise_fd_limit(100 - RESERVED)
    assert limit == [100, 200]
    raise_fd_limit(200 - RESERVED)
    assert limit == [200, 200]
    assert fd_limited_connections() == 200 - RESERVED


def test_an_unlimited_process_keeps_its_limit(limit) -> None:
    limit[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert raise_max_open_files(1000) is None
    assert limit == [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert max_open_files() is None


def test_a_free_port_can_be_listened_on_and_leaves_out_the_taken_ones() -> None:
    for _ in range(9):  # another process may take it meanwhile
        with suppress(OSError), socket.create_server(("127.0.0.1", free_port())):
            break
    else:
        pytest.fail("no free port could be listened on")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(first=port) != port
    assert free_port(first=80) >= FIRST_FOR_ANYONE


def test_connections_that_can_never_be_had_are_refused_with_a_number_that_can(limit) -> None:
    with pytest.raises(ConfigError, match="1064 file descriptors, and the process may have 200") as caught:
        Lifecycle(EngineConfig(), ServeSettings(max_connections=1000))
    [remedy] = caught.value.remedies
    assert remedy.setting == "max_connections"
    raise_fd_limit(remedy.value)
    limit[:] = [100, 200]
    route = RouteSettings(("http://127.0.0.1:1",))
    with pytest.raises(ConfigError, match="264 file descriptors, and the process may have 200") as caught:
        RouteLifecycle(ServeSettings(max_connections=100), route)
    [remedy] = caught.value.remedies
    assert RouteLifecycle(ServeSettings(max_connections=remedy.value), route).occupancy.most == remedy.value
    assert RouteLifecycle(ServeSettings(), route).occupancy.most == (200 - RESERVED) // 2
    limit[:] = [100, resource.RLIM_INFINITY]
    raise_fd_limit(1000)
    assert limit[0] == 1000 + RESERVED
