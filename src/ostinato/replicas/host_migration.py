"""Migration of requests, as a replica sees it: exports from its engine, and imports into it.

Exports are in order, and kept until the move is complete. An imported request's bytes stay with the other replica until
they are here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ostinato.engine.process.engine_messages import (
    EngineReply,
    ExportRequest,
    ImportRequest,
    RequestExported,
    picklable_error,
)
from ostinato.errors import EngineFailed
from ostinato.replicas.replica_messages import (
    AcceptMove,
    CancelMove,
    CommitMove,
    FrontConnection,
    MovePrepared,
    PrepareMove,
)
from ostinato.sampling.guide import Guide

FETCH_SECONDS = 30.0
"""Seconds in which the other replica has to give each piece."""

Fetch = Callable[[str, str, int], Awaitable[bytes]]
"""Function (replica, request, offset) -> some bytes of the export that the replica keeps, from the offset on."""


class MoveTarget:
    """Fetches requests one after the other, so that the bytes of only one are held until the engine has imported it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def fetch(
        self,
        source: str,
        request_id: str,
        size: int,
        is_wanted: Callable[[], bool],
        take: Callable[[bytes], None],
        refuse: Callable[[Exception], None],
    ) -> None:
        """Call `take` with a request's bytes or `refuse` with an error, unless the request is not wanted any more."""

        async def run() -> None:
            try:
                async with self._turn:
                    exported = await self._whole(source, request_id, size, is_wanted)
            except Exception as error:
                if is_wanted():
                    refuse(picklable_error(error))
            else:
                if is_wanted():
                    take(exported)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """Cancel all fetches."""
        for task in self._tasks:
            task.cancel()

    async def _whole(self, source: str, request_id: str, size: int, is_wanted: Callable[[], bool]) -> bytes:
        received = bytearray()
        while len(received) < size and is_wanted():
            piece = await asyncio.wait_for(self._fetch(source, request_id, len(received)), FETCH_SECONDS)
            if not piece:
                raise EOFError(f"replica {source} has {len(received)} bytes of a request, and said {size}")
            received += piece
        return bytes(received)


MAX_KEPT_BYTES = 2**30
"""Bytes that are kept at a time: the next request is exported once there are fewer."""
PIECE = 8 * 2**20
"""Bytes that are sent at a time."""
CALL = "leave/"
"""Prefix of the ids of export calls."""


class MoveSource:
    """Queue of requests to export, by the engine's ids. A request is computed until it is exported."""

    def __init__(self, send: Callable[[Any], None], tell: Callable[[str, MovePrepared], None]) -> None:
        """Create an empty queue. `send` reaches the engine, `tell` the front that wants the request moved."""
        self._send, self._tell = send, tell
        self._queue: deque[str] = deque()
        self._leaving: str | None = None
        """Request whose export the engine has been asked for."""
        self._is_dropped = False
        """True if the request being exported is not wanted any more."""
        self._exports: dict[str, bytes] = {}

    @property
    def num_kept(self) -> int:
        """Number of requests that are in no engine."""
        return len(self._exports)

    def leave(self, request_id: str) -> None:
        """Export a request as soon as those before it have been."""
        self._queue.append(request_id)
        self._export_next()

    def drop(self, request_id: str) -> None:
        """Drop a request that another engine has imported, or that was abandoned."""
        self._exports.pop(request_id, None)
        if request_id in self._queue:
            self._queue.remove(request_id)
        if request_id == self._leaving:
            self._is_dropped = True
        self._export_next()

    def drop_all(self, prefix: str) -> None:
        """Drop the requests whose ids begin with `prefix`, since their front is gone."""
        for request_id in [*self._exports, *self._queue, *filter(None, [self._leaving])]:
            if request_id.startswith(prefix):
                self.drop(request_id)

    def exported(self, exported: bytes | None, error: Exception | None = None) -> None:
        """Handle the engine's answer to an export."""
        assert self._leaving is not None, "it was asked"
        request_id, self._leaving = self._leaving, None
        if not self._is_dropped:
            if exported is not None:
                self._exports[request_id] = exported
            self._tell(request_id, MovePrepared(request_id, None if exported is None else len(exported), error))
        self._export_next()

    def take_back(self, request_id: str) -> bytes | None:
        """Return the bytes of a request, which are not kept any longer; None if they were not."""
        exported = self._exports.pop(request_id, None)
        self._export_next()
        return exported

    def piece(self, request_id: str, offset: int) -> bytes:
        """Return some of the bytes of a request, from `offset` on. LookupError if they are not kept."""
        if request_id not in self._exports:
            raise LookupError(f"request {request_id} is not kept here")
        return self._exports[request_id][offset : offset + PIECE]

    def _export_next(self) -> None:
        if self._queue and self._leaving is None and sum(map(len, self._exports.values())) < MAX_KEPT_BYTES:
            self._leaving, self._is_dropped = self._queue.popleft(), False
            self._send(ExportRequest(CALL + self._leaving, self._leaving))


class HostMigration:
    """Exports and imports of a replica. Fronts decide moves and never pass bytes, which go between replicas."""

    def __init__(
        self, send: Callable[[Any], None], fronts: Mapping[str, FrontConnection], note_change: Callable[[], None]
    ) -> None:
        """Start without moves. `send` reaches the engine, `fronts` are the connected ones, by name.

        `note_change` is called when a request has moved away, or will not arrive.
        """
        self.fetch: Fetch = _nowhere
        """Function that fetches bytes from other replicas."""
        self.departures = MoveSource(send, self._tell_left)
        self._send, self._fronts, self._note_change = send, fronts, note_change
        self._arrivals = MoveTarget(lambda source, request_id, offset: self.fetch(source, request_id, offset))

    def take(
        self, name: str, front: FrontConnection, message: PrepareMove | CommitMove | CancelMove | AcceptMove
    ) -> None:
        """Handle a message of the front `name`."""
        request_id = f"{name}/{message.request_id}"
        match message:
            case PrepareMove():
                self.departures.leave(request_id)
            case CommitMove():
                self.departures.drop(request_id)
                self._note_change()
            case CancelMove(front_request_id, guide):
                self._take_back(request_id, front, front_request_id, guide)
            case AcceptMove():
                self._await_arrival(name, front, message)

    def take_from_engine(self, message: object) -> bool:
        """Handle a message of the engine, and return True, if it answers an export."""
        match message:
            case RequestExported(_, _, exported):
                self.departures.exported(exported)
            case EngineReply(call_id, _, error) if call_id.startswith(CALL):
                self.departures.exported(None, error)
            case _:
                return False
        return True

    def drop(self, request_id: str) -> None:
        """Drop an abandoned request."""
        self.departures.drop(request_id)

    def end(self) -> None:
        """Cancel all imports."""
        self._arrivals.end()

    def _take_back(self, request_id: str, front: FrontConnection, front_request_id: str, guide: Guide | None) -> None:
        exported = self.departures.take_back(request_id)
        if exported is None:
            front.put(EngineReply(front_request_id, error=EngineFailed("the request is not kept here")))
            return
        front.requests.add(front_request_id)
        self._send(ImportRequest(request_id, exported, guide))

    def _await_arrival(self, name: str, front: FrontConnection, message: AcceptMove) -> None:
        front_request_id, source, size, guide = message
        request_id = f"{name}/{front_request_id}"
        front.requests.add(front_request_id)

        def is_wanted() -> bool:
            return front_request_id in front.requests and self._fronts.get(name) is front

        def refuse(error: Exception) -> None:
            front.requests.discard(front_request_id)
            self._note_change()
            front.put(EngineReply(front_request_id, error=error))

        def take(exported: bytes) -> None:
            self._send(ImportRequest(request_id, exported, guide))

        self._arrivals.fetch(source, request_id, size, is_wanted, take, refuse)

    def _tell_left(self, request_id: str, message: MovePrepared) -> None:
        name, _, front_request_id = request_id.partition("/")
        if (front := self._fronts.get(name)) is not None:
            front.put(message._replace(request_id=front_request_id))


async def _nowhere(source: str, *_: object) -> bytes:
    raise LookupError(f"replica {source} cannot be reached from here")
