"""Backends for the router that do what they should not: scripts in place of servers, on a loop in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.patience import PATIENCE

Answer = Callable[["OddBackend", asyncio.StreamWriter], Awaitable[None]]


def head(status: int = 200, kind: str = "application/json", length: int | None = None) -> bytes:
    size = "" if length is None else f"content-length: {length}\r\n"
    return f"HTTP/1.1 {status} Odd\r\ncontent-type: {kind}\r\n{size}connection: close\r\n\r\n".encode()


def says(value: Any, status: int = 200) -> Answer:
    """An answer of JSON."""

    async def answer(_: OddBackend, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(value).encode()
        writer.write(head(status, length=len(body)) + body)

    return answer


def events(*batches: Any, ends: bool = False) -> Answer:
    """A stream of events, each one a batch or bytes as they are."""

    async def answer(backend: OddBackend, writer: asyncio.StreamWriter) -> None:
        writer.write(head(kind="text/event-stream"))
        for batch in batches:
            writer.write(batch if isinstance(batch, bytes) else b"data: " + json.dumps(batch).encode() + b"\n\n")
        await writer.drain()
        if not ends:
            await backend.ended.wait()

    return answer


async def hangs(backend: OddBackend, _: asyncio.StreamWriter) -> None:
    """No answer at all, and no end of the connection."""
    backend.num_hanging += 1
    await backend.ended.wait()


async def begins_and_hangs(backend: OddBackend, writer: asyncio.StreamWriter) -> None:
    """A stream that begins, and never goes on."""
    writer.write(head(kind="text/event-stream") + b'data: {"choices": []}\n\n')
    await writer.drain()
    await hangs(backend, writer)


async def is_rubbish(_: OddBackend, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff rubbish\r\n\r\n")


CONTENTS: dict[str, Any] = {"seq": 0, "replay_left": 0, "events": [{"type": "AllBlocksCleared"}]}
"""The first batch of events of a server that has nothing cached."""


@dataclass
class OddBackend:
    """A scripted server. `answers` is by path, without its query; others are not found."""

    answers: dict[str, Answer]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    num_hanging: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
            await reader.readexactly(length)
            path = lines[0].split(" ")[1].partition("?")[0]
            self.asked.append(path)
            await self.answers.get(path, says({}, 404))(self, writer)
            await writer.drain()
        writer.close()


@contextmanager
def odd_backend(answers: dict[str, Answer]) -> Iterator[OddBackend]:
    """A scripted server on a free port."""
    backend, started = OddBackend(answers), threading.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        server = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
        backend.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await backend.ended.wait()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield backend
    finally:
        loop.call_soon_threadsafe(backend.ended.set)
        thread.join(PATIENCE)
        loop.close()
