"""Migration of requests, as a replica sees it: exports from its engine, and imports into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ostinato.engine.process.failures import EngineFailed
from ostinato.engine.process.messages import RequestExported, ImportRequest, EngineReply
from ostinato.engine.replicas.arrivals import MoveTarget, Fetch
from ostinato.engine.replicas.connection import FrontConnection
from ostinato.engine.replicas.departures import CALL, MoveSource
from ostinato.engine.replicas.messages import AcceptMove, PrepareMove, MovePrepared, CommitMove, CancelMove
from ostinato.sample.guide import Guide


class HostMigration:
    """Exports and imports of one replica. Fronts decide what moves and whereto.

    Bytes go from replica to replica, never through a front.
    """

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

    def take(self, name: str, front: FrontConnection, message: PrepareMove | CommitMove | CancelMove | AcceptMove) -> None:
        """Handle a message of the front `name`."""
        request_id = f"{name}/{message.request_id}"
        match message:
            case PrepareMove():
                self.departures.leave(request_id)
            case CommitMove():
                self.departures.drop(request_id)
                self._note_change()
            case CancelMove(own, guide):
                self._take_back(request_id, front, own, guide)
            case AcceptMove():
                self._await_arrival(name, front, message)

    def take_from_engine(self, message: Any) -> bool:
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

    def _take_back(self, request_id: str, front: FrontConnection, own: str, guide: Guide | None) -> None:
        exported = self.departures.take_back(request_id)
        if exported is None:
            front.put(EngineReply(own, error=EngineFailed("the request is not kept here")))
            return
        front.requests.add(own)
        self._send(ImportRequest(request_id, exported, guide))

    def _await_arrival(self, name: str, front: FrontConnection, message: AcceptMove) -> None:
        own, source, size, guide = message
        request_id = f"{name}/{own}"
        front.requests.add(own)

        def is_wanted() -> bool:
            return own in front.requests and self._fronts.get(name) is front

        def refuse(error: Exception) -> None:
            front.requests.discard(own)
            self._note_change()
            front.put(EngineReply(own, error=error))

        def take(exported: bytes) -> None:
            self._send(ImportRequest(request_id, exported, guide))

        self._arrivals.fetch(source, request_id, size, is_wanted, take, refuse)

    def _tell_left(self, request_id: str, message: MovePrepared) -> None:
        name, _, own = request_id.partition("/")
        if (front := self._fronts.get(name)) is not None:
            front.put(message._replace(request_id=own))


async def _nowhere(source: str, *_: object) -> bytes:
    raise LookupError(f"replica {source} cannot be reached from here")
