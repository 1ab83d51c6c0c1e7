"""What a front and a replica tell each other beside the messages of a server and its engine's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ostinato.engine.process.messages import Observation, Started
from ostinato.replicas.published import Changes
from ostinato.sample.guide import Guide

# To the replica.


class Retell(NamedTuple):
    """The front has missed something: the replica is to tell of its whole index."""


class Parted(NamedTuple):
    """The front knows that the replica drains, and sends no new requests."""


class Leave(NamedTuple):
    """Another replica goes on with the request: it is exported here, and kept until a Release or a TakeBack. Its answer
    is a Left."""

    request_id: str


class Arrive(NamedTuple):
    """The replica goes on with a request that `source` keeps, `size` bytes; its answer is a Reply, as to a Submit."""

    request_id: str
    source: str
    size: int
    guide: Guide | None


class Release(NamedTuple):
    """Another replica has the request, or nobody waits for it: what is kept of it is not needed."""

    request_id: str


class TakeBack(NamedTuple):
    """No other replica goes on with the request that is kept: this one does; its answer is a Reply."""

    request_id: str
    guide: Guide | None


PING_SECONDS = 5.0
"""After which a front says something, if it has nothing to say: an empty list."""

# From the replica.


class Hello(NamedTuple):
    """The first message."""

    started: Started


class Told(NamedTuple):
    """Once a second: the engine's counts, and how its index has changed, if it has."""

    observation: Observation
    changes: Changes | None


class Draining(NamedTuple):
    """The replica ends once its requests have ended or moved; told again when time runs short."""

    is_short_of_time: bool = False


class Left(NamedTuple):
    """The answer to a Leave: how many bytes are kept, None if none are, since the request has ended by itself, or goes
    on for an `error`. Its last gain here, whose outputs end with `moved`, comes beside it."""

    request_id: str
    size: int | None
    error: Exception | None = None


class Link(Protocol):
    """A front's connection to one replica. Both functions are called on the front's loop."""

    name: str
    """Of the replica. One that comes back has another name."""
    on_messages: Callable[[Sequence[Any]], None]
    """What the replica says, in its order."""
    on_lost: Callable[[], None]
    """The replica is gone, or has ended; called once, at the end."""

    def send(self, message: Any) -> None:
        """Sends a message, without waiting. Messages after the end are dropped."""

    def close(self) -> None:
        """Ends the connection: the replica drops this front's requests. `on_lost` is not called."""
