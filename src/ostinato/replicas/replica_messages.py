"""Messages between a front and a replica, and the replica's connection to one front.

Those between a server and its engine's process are used here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ostinato.engine.process.engine_messages import EngineStarted, StatsSnapshot
from ostinato.replicas.index_sync import IndexChanges, IndexPublisher
from ostinato.sampling.guide import Guide

# Messages to the replica.


class ResendIndex(NamedTuple):
    """A request to report the whole index, since the front has missed a report."""


class DrainAcknowledged(NamedTuple):
    """Confirmation that the front knows of the drain, and sends no new requests."""


class PrepareMove(NamedTuple):
    """An order to export a request and keep it until a CommitMove or a CancelMove; its answer is a MovePrepared."""

    request_id: str


class AcceptMove(NamedTuple):
    """An order to import a request, `size` bytes kept by `source`; its answer is an EngineReply."""

    request_id: str
    source: str
    size: int
    guide: Guide | None


class CommitMove(NamedTuple):
    """An order to drop the export of a request that another replica has imported, or that was abandoned."""

    request_id: str


class CancelMove(NamedTuple):
    """An order to import a request again that no other replica takes; its answer is an EngineReply."""

    request_id: str
    guide: Guide | None


PING_SECONDS = 5.0
"""Seconds after which an otherwise silent front sends an empty list."""

# Messages from the replica.


class ReplicaReady(NamedTuple):
    """The first message."""

    started: EngineStarted


class ReplicaStatus(NamedTuple):
    """Report, once a second, of the engine's counts, and of the changes of its index, if there are any."""

    observation: StatsSnapshot
    changes: IndexChanges | None


class ReplicaDraining(NamedTuple):
    """Notice that the replica ends once its requests have ended or moved; sent again when time runs short."""

    is_short_of_time: bool = False


class MovePrepared(NamedTuple):
    """The answer to a PrepareMove: the number of bytes that are kept.

    None if no bytes are kept, because the request has ended by itself, or because an `error` prevented the export and
    the request continues here. Its last delta here, whose outputs end with `moved`, is sent separately.
    """

    request_id: str
    size: int | None
    error: Exception | None = None


class ReplicaLink(Protocol):
    """A front's connection to one replica. Both callbacks are called on the front's loop."""

    name: str
    """Name of the replica. One that comes back has another name."""
    on_messages: Callable[[Sequence[object]], None]
    """Callback for the replica's messages, in their order."""
    on_lost: Callable[[], None]
    """Callback for a replica that is gone or has ended; called once, at the end."""

    def send(self, message: object) -> None:
        """Send a message, without waiting. Messages after the end are dropped."""

    def close(self) -> None:
        """End the connection: the replica drops this front's requests. `on_lost` is not called."""


@dataclass
class FrontConnection:
    """Messages that wait to be sent to a front, and its requests in the engine."""

    publisher: IndexPublisher = field(default_factory=IndexPublisher)
    waiting: list[object] = field(default_factory=list)
    has_messages: asyncio.Event = field(default_factory=asyncio.Event)
    requests: set[str] = field(default_factory=set)
    acknowledged_drain: bool = False
    is_gone: bool = False
    last_message_at: float = 0.0

    def put(self, message: object) -> None:
        self.waiting.append(message)
        self.has_messages.set()
