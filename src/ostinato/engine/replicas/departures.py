"""Requests that move from a replica's engine to another one: exported in order, and kept until the move is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ostinato.engine.process.messages import ExportRequest
from ostinato.engine.replicas.messages import MovePrepared

MAX_KEPT_BYTES = 2**30
"""Bytes that are kept at a time: the next request is exported once there are fewer."""
PIECE = 8 * 2**20
"""Bytes that are sent at a time."""
CALL = "leave/"
"""Prefix of the ids of export calls."""


class MoveSource:
    """Queue of requests to export, by the engine's ids. A request is computed until it is exported."""

    def __init__(self, send: Callable[[Any], None], tell: Callable[[str, MovePrepared], None]) -> None:
        """Create an empty queue.

        `send` reaches the engine, `tell` the front that wants the request of this id moved.
        """
        self._send, self._tell = send, tell
        self._queue: deque[str] = deque()
        self._leaving: str | None = None
        """Request whose export the engine has been asked for."""
        self._is_dropped = False
        """True if the request being exported is not wanted any more."""
        self._kept: dict[str, bytes] = {}

    @property
    def num_kept(self) -> int:
        """Number of requests that are in no engine."""
        return len(self._kept)

    def leave(self, request_id: str) -> None:
        """Export a request as soon as those before it have been."""
        self._queue.append(request_id)
        self._export_next()

    def drop(self, request_id: str) -> None:
        """Drop a request that another engine has imported, or that was abandoned."""
        self._kept.pop(request_id, None)
        if request_id in self._queue:
            self._queue.remove(request_id)
        if request_id == self._leaving:
            self._is_dropped = True
        self._export_next()

    def drop_all(self, prefix: str) -> None:
        """Drop the requests whose ids begin with `prefix`, since their front is gone."""
        for request_id in [*self._kept, *self._queue, *filter(None, [self._leaving])]:
            if request_id.startswith(prefix):
                self.drop(request_id)

    def exported(self, exported: bytes | None, error: Exception | None = None) -> None:
        """Handle the engine's answer to an export."""
        assert self._leaving is not None, "it was asked"
        request_id, self._leaving = self._leaving, None
        if not self._is_dropped:
            if exported is not None:
                self._kept[request_id] = exported
            self._tell(request_id, MovePrepared(request_id, None if exported is None else len(exported), error))
        self._export_next()

    def take_back(self, request_id: str) -> bytes | None:
        """Return the bytes of a request, which are not kept any longer; None if they were not."""
        exported = self._kept.pop(request_id, None)
        self._export_next()
        return exported

    def piece(self, request_id: str, offset: int) -> bytes:
        """Return some of the bytes of a request, from `offset` on. LookupError if they are not kept."""
        if request_id not in self._kept:
            raise LookupError(f"request {request_id} is not kept here")
        return self._kept[request_id][offset : offset + PIECE]

    def _export_next(self) -> None:
        if self._queue and self._leaving is None and sum(map(len, self._kept.values())) < MAX_KEPT_BYTES:
            self._leaving, self._is_dropped = self._queue.popleft(), False
            self._send(ExportRequest(CALL + self._leaving, self._leaving))
