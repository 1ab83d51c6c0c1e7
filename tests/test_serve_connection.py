"""How long a connection waits for its reader, on a transport that says what it has left to send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ostinato.serve.http import connection as connections


class Transport(asyncio.Transport):
    """Has so many bytes left, each time that it is asked."""

    def __init__(self, left: Sequence[int]) -> None:
        super().__init__()
        self.left = list(left)
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        if len(self.left) == 1:
            return self.left[0]
        return self.left.pop(0)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


async def connected(left: Sequence[int]) -> tuple[connections.Connection, Transport]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    connection = connections.Connection(uvicorn.Config(app), ServerState(), {})
    transport = Transport(left)
    connection.connection_made(transport)
    return connection, transport


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED", 0.01)


def test_a_reader_that_takes_something_is_waited_for_and_one_that_takes_nothing_is_not() -> None:
    async def go() -> list[int]:
        connection, transport = await connected([50, 40, 40, 30, 30, 30, 20, 7])
        connection.pause_writing()
        await asyncio.wait_for(transport.aborted.wait(), 60)
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


@pytest.mark.parametrize(("left", "is_aborted"), [(9, True), (0, False)])
def test_the_end_of_an_answer_is_waited_for_as_long(left: int, is_aborted: bool) -> None:
    async def go() -> bool:
        connection, transport = await connected([left])
        connection.timeout_keep_alive_handler()
        if is_aborted:
            await asyncio.wait_for(transport.aborted.wait(), 60)
        else:
            await asyncio.sleep(0.05)
        return transport.aborted.is_set()

    assert asyncio.run(go()) is is_aborted
