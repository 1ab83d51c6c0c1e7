"""A client's connection, which is cut when the client stops reading."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

STALLED = 60.0
"""Seconds without progress after which a client that does not read counts as gone."""


class Connection(asyncio.Protocol):
    """Hands everything on to uvicorn's protocol, and limits how long it waits for a reader.

    uvicorn closes a connection only when the client has read what was written, which may be never. If a client reads
    nothing for `STALLED` seconds, its connection is aborted; its request then ends like that of any client that left.
    """

    def __init__(self, **arguments: Any) -> None:
        """`arguments` are those of uvicorn's protocol."""
        self._protocol = AutoHTTPProtocol(**arguments)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Anything that the client has not read pauses writing: also the end of an answer, however short.
        self._transport.set_write_buffer_limits(high=0)
        self._protocol.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._end_wait()
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self._protocol.connection_lost(exc)

    def _wait_for_reader(self) -> None:
        self._end_wait()
        left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(STALLED, self._look, left)

    def _look(self, left_before: int) -> None:
        if self._transport.get_write_buffer_size() < left_before:
            self._wait_for_reader()
        else:
            self._transport.abort()

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
