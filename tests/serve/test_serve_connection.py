"""How long a connection waits for its reader, on a transport that says what it has left to send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ostinato.serve.http import connection as connections
from ostinato.serve.http.connection_limits import ConnectionLimits
from tests.support.patience import PATIENCE

SOON = ConnectionLimits(stalled_seconds=0.01)


class Transport(asyncio.Transport):
    """Has so many bytes left, each time that it is asked."""

    def __init__(self, left: Sequence[int]) -> None:
        super().__init__()
        self.high: int | None = None
        self.written = b""
        self.left = list(left)
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        if len(self.left) == 1:
            return self.left[0]
        return self.left.pop(0)

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        self.high = high

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted.set()


async def connected(left: Sequence[int]) -> tuple[connections.HttpConnection, Transport]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    connection = connections.HttpConnection(uvicorn.Config(app), ServerState(), app_state={}, limits=SOON)
    transport = Transport(left)
    connection.connection_made(transport)
    return connection, transport


def test_a_reader_that_takes_something_is_waited_for_and_one_that_takes_nothing_is_not() -> None:
    async def go() -> list[int]:
        connection, transport = await connected([50, 40, 40, 30, 30, 30, 20, 7])
        connection.pause_writing()
        await asyncio.wait_for(transport.aborted.wait(), PATIENCE)
        return transport.left

    # Each look is followed by another measure where the next wait begins: 50 | 40, 40 | 30, 30 | 30, the same.
    assert asyncio.run(go()) == [20, 7]


@pytest.mark.parametrize("end", ["resume_writing", "connection_lost"])
def test_nobody_is_waited_for_once_all_is_taken_or_the_client_is_gone(end: str) -> None:
    async def go() -> bool:
        connection, transport = await connected([50, 50])
        connection.pause_writing()
        getattr(connection, end)(*([None] if end == "connection_lost" else []))
        await asyncio.sleep(0.05)
        return transport.aborted.is_set()

    assert not asyncio.run(go())


def test_the_end_of_an_answer_is_waited_for_as_long() -> None:
    async def go() -> int | None:
        connection, transport = await connected([9])
        connection.pause_writing()
        await asyncio.wait_for(transport.aborted.wait(), PATIENCE)
        return transport.high

    # With this limit a transport pauses for whatever it could not send at once, however short.
    assert asyncio.run(go()) == 0


def test_the_protocol_of_http_is_told_all_that_happens() -> None:
    async def go() -> bool:
        _, transport = await connected([0])
        state = ServerState()
        connection = connections.HttpConnection(config=uvicorn.Config(app), server_state=state, app_state={})
        connection.connection_made(transport)
        assert len(state.connections) == 1
        connection.data_received(b"nonsense\r\n\r\n")
        connection.connection_lost(None)
        return not state.connections and transport.written.startswith(b"HTTP/1.1 400")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    assert asyncio.run(go())
