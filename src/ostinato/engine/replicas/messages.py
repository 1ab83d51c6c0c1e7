"""What a front and a replica tell each other beside the messages of a server and its engine's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ostinato.engine.process.messages import Observation, Started
from ostinato.replicas.published import Changes

# To the replica.


class Retell(NamedTuple):
    """The front has missed something: the replica is to tell of its whole index."""


class Parted(NamedTuple):
    """The front knows that the replica drains, and sends no new requests."""


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
    """The replica ends once its requests have ended."""


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
