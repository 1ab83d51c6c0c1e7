"""Attacks of one client, measured by a second one: /health answers within 0.1 s at every moment, no stream of the
second client pauses for more than 0.3 s, in a flood it waits less than 0.1 s for a first token, and what the server
holds for the first one is given back.

The times are those of a quiet machine, so `make soak` runs them, and `make test` only what makes them short.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest

from tests.support.server_process import Process

pytestmark = pytest.mark.attacks

SECONDS = 10
"""How long each attack goes on."""
HEALTH, PAUSE, FIRST_TOKEN, HELD = 0.1, 0.3, 0.1, 20 * 2**20
A, B = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
IDS = [5 + i * 7 % 400 for i in range(4000)]
SCORED = {"prompt": IDS, "echo": True, "logprobs": 20, "max_tokens": 0}
LARGE = {"prompt": [[5 + i, 6, 7] for i in range(4)], "n": 4, "max_tokens": 1000, "logprobs": 20, "ignore_eos": True}
TALK = [{"role": "user", "content": "Ava has 17 apples."}]

HOSTILE = """\
{%- if messages[0].content == 'loops' -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif messages[0].content == 'pads' -%}{{- 'x' | center(10**9) -}}
{%- elif messages[0].content == 'sorts' -%}{{- range(10**5) | list | sort | tojson(indent=9999) -}}
{%- else -%}{%- for message in messages -%}{{- 'Q: ' + message.content + '\\nA:' -}}{%- endfor -%}{%- endif -%}
"""
"""A template from a stranger."""
FLAGS = ("--api-key", "key-a", "--api-key", "key-b", "--max-num-seqs", "32", "--max-requests-per-client", "256")
numbers = itertools.count()

Attack = Callable[[httpx2.AsyncClient, Process], Awaitable[object]]


class UnreadProcess(Process):
    """A server whose log lines nobody reads, once it listens."""

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if "listening on" in line:
                return


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("attacks") / "hostile.jinja"
    template.write_text(HOSTILE)
    server = Process(*FLAGS, "--chat-template", str(template))
    try:
        server.ready()
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def post(path: str, body: dict[str, object]) -> Attack:
    async def attack(client: httpx2.AsyncClient, server: Process) -> None:
        await client.post(f"{server.url}{path}", json=body, headers=A)

    return attack


def get(*paths: str) -> Attack:
    async def attack(client: httpx2.AsyncClient, server: Process) -> None:
        for path in paths:
            await client.get(f"{server.url}{path}", headers=A)

    return attack


async def render_hostile(client: httpx2.AsyncClient, server: Process) -> None:
    for content in ("loops", "pads", "sorts"):
        await post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})(client, server)


async def guide_heavily(client: httpx2.AsyncClient, server: Process) -> None:
    """Asks for a guide that is near the limits, and of its own."""
    number = next(numbers)
    properties = {f"p{number}_{i}": {"type": "string", "maxLength": 1000 + i} for i in range(400)}
    body = {"prompt": "a", "max_tokens": 16, "guided_json": {"type": "object", "properties": properties}}
    await post("/v1/completions", body)(client, server)


async def kill_workers(client: httpx2.AsyncClient, server: Process) -> None:
    """Has a large body read, and meanwhile kills the workers and the process that they are forked from."""
    reading = asyncio.ensure_future(post("/tokenize", {"prompt": "a b c d " * 5000})(client, server))
    await asyncio.sleep(0.1)
    for pid in server.descendants():
        with contextlib.suppress(OSError):
            if "body_workers.forkserver" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)
    await reading


def leave(body: dict[str, object], reads: int) -> Attack:
    """Asks for a stream, reads so many bytes, waits and goes."""

    async def attack(_: httpx2.AsyncClient, server: Process) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer key-a\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, head.encode() + data)
        if reads:
            await loop.sock_recv(connection, reads)
        await asyncio.sleep(3)
        connection.close()

    return attack


ATTACKS: dict[str, tuple[int, Attack]] = {
    "echo with log-probabilities": (8, post("/v1/completions", SCORED)),
    "echo with log-probabilities, streamed": (8, post("/v1/completions", {**SCORED, "stream": True})),
    "long chats with log-probabilities": (
        8,
        post(
            "/v1/chat/completions",
            {"messages": TALK, "n": 4, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "ignore_eos": True},
        ),
    ),
    "embeddings as numbers": (4, post("/v1/embeddings", {"input": [[5 + i % 90, 6, 7] for i in range(1000)]})),
    "texts of many tokens": (8, post("/tokenize", {"prompt": "a b c d " * 2000, "return_token_strs": True})),
    "readers that never read": (8, leave(LARGE, 0)),
    "readers that go": (8, leave(LARGE, 4096)),
    "hostile templates": (8, render_hostile),
    "twenty heavy guides": (20, guide_heavily),
    "killed workers": (2, kill_workers),
    "the pages of the API": (8, get("/docs", "/openapi.json")),
    "a flood": (48, post("/v1/completions", {"prompt": [5, 6], "n": 4, "max_tokens": 200, "ignore_eos": True})),
}


def held_bytes(url: str) -> float:
    text = httpx2.get(f"{url}/metrics", timeout=60, headers=B).text
    [line] = re.findall(r"^ostinato:unread_answer_bytes.* (\S+)$", text, re.MULTILINE)
    return float(line)


async def run(server: Process, count: int, attack: Attack) -> None:
    end = time.monotonic() + SECONDS

    async def repeat(client: httpx2.AsyncClient) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(httpx2.HTTPError, OSError):
                await attack(client, server)

    limits = httpx2.Limits(max_connections=count)
    async with httpx2.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(repeat(client) for _ in range(count)))


def attacked(server: Process, name: str, count: int, attack: Attack) -> dict[str, float]:
    """Attack a server; return what a second client saw, which is asserted, too."""
    url = server.url
    watcher = Path(__file__).with_name("second_client.py")
    command = [sys.executable, str(watcher), url.removeprefix("http://"), "key-b"]
    before = held_bytes(url)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout.readline() == "begun\n"
        asyncio.run(run(server, count, attack))
        told, _ = second.communicate()
    result = json.loads(told)
    print(f"{name}: {result}")
    assert result["streams"] > 0
    assert result["health"] < HEALTH
    assert result["pause"] < PAUSE
    end = time.monotonic() + 10
    while held_bytes(url) > before + HELD and time.monotonic() < end:
        time.sleep(0.1)
    assert held_bytes(url) < before + HELD
    return result


@pytest.mark.parametrize("name", ATTACKS)
def test_a_second_client_hardly_notices(server, name):
    result = attacked(server, name, *ATTACKS[name])
    if name == "a flood":
        assert result["first_token"] < FIRST_TOKEN


def test_a_second_client_hardly_notices_that_nobody_reads_the_log():
    server = UnreadProcess(*FLAGS, "--log-level", "debug")
    try:
        server.ready()
        attacked(server, "unread log", 16, get("/nothing" * 20))
        assert "ostinato:log_lines_dropped_total" in httpx2.get(f"{server.url}/metrics", timeout=60, headers=B).text
    finally:
        server.process.terminate()
        server.process.wait()
