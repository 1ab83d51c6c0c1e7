"""Requests that leave a replica's engine for another one's: exported in turn, and kept until they are elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ostinato.engine.process.messages import Export
from ostinato.engine.replicas.messages import Left

MOST_KEPT = 2**30
"""Bytes that are kept at a time: the next request is exported once there are fewer."""
PIECE = 8 * 2**20
"""Bytes that are handed over at a time."""
CALL = "leave/"
"""What ids of exports begin with."""


class Departures:
    """Requests are known by the engine's ids. Until one is exported, it goes on."""

    def __init__(self, send: Callable[[Any], None], tell: Callable[[str, Left], None]) -> None:
        """`send` reaches the engine, `tell` whoever wants the request of this id moved."""
        self._send, self._tell = send, tell
        self._queue: deque[str] = deque()
        self._leaving: str | None = None
        """Whose export the engine has been asked for."""
        self._is_dropped = False
        """Whether nobody waits for that one any more."""
        self._kept: dict[str, bytes] = {}

    @property
    def num_kept(self) -> int:
        """Requests that are in no engine."""
        return len(self._kept)

    def leave(self, request_id: str) -> None:
        """Exports a request as soon as those before it have been."""
        self._queue.append(request_id)
        self._export_next()

    def drop(self, request_id: str) -> None:
        """Another engine has the request, or nobody waits for it any more."""
        self._kept.pop(request_id, None)
        if request_id in self._queue:
            self._queue.remove(request_id)
        if request_id == self._leaving:
            self._is_dropped = True
        self._export_next()

    def drop_all(self, prefix: str) -> None:
        """Nobody waits any more for requests whose ids begin so."""
        for request_id in [*self._kept, *self._queue, *filter(None, [self._leaving])]:
            if request_id.startswith(prefix):
                self.drop(request_id)

    def exported(self, exported: bytes | None, error: Exception | None = None) -> None:
        """The engine has answered."""
        assert self._leaving is not None, "it was asked"
        request_id, self._leaving = self._leaving, None
        if not self._is_dropped:
            if exported is not None:
                self._kept[request_id] = exported
            self._tell(request_id, Left(request_id, None if exported is None else len(exported), error))
        self._export_next()

    def take_back(self, request_id: str) -> bytes | None:
        """The bytes of a request, which are not kept any longer; None if they were not."""
        exported = self._kept.pop(request_id, None)
        self._export_next()
        return exported

    def piece(self, request_id: str, offset: int) -> bytes:
        """Some of the bytes of a request, from `offset` on. LookupError if they are not kept."""
        if request_id not in self._kept:
            raise LookupError(f"request {request_id} is not kept here")
        return self._kept[request_id][offset : offset + PIECE]

    def _export_next(self) -> None:
        if self._queue and self._leaving is None and sum(map(len, self._kept.values())) < MOST_KEPT:
            self._leaving, self._is_dropped = self._queue.popleft(), False
            self._send(Export(CALL + self._leaving, self._leaving))
