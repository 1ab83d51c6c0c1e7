"""A client's connection, which is closed at once when the client takes nothing more of what it is sent."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

STALLED = 60.0
"""Seconds after which a client that takes nothing of what is sent counts as gone."""


class Connection(HttpToolsProtocol):
    """uvicorn's, with an end to waiting for a reader.

    To close a transport is to wait until its client has read what was written, which may be for ever. Whoever takes
    nothing of it for `STALLED` seconds loses the connection, with what is left; its request then ends as that of any
    client that went.
    """

    _patience: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._end_wait()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # The end of an answer may be too short to have paused anybody.
        if self.transport.get_write_buffer_size():
            self._wait_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _wait_for_reader(self) -> None:
        self._end_wait()
        left = self.transport.get_write_buffer_size()
        self._patience = self.loop.call_later(STALLED, self._look, left)

    def _look(self, left_before: int) -> None:
        if self.transport.get_write_buffer_size() < left_before:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _end_wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
