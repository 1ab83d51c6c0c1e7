"""Guides that a front has compiled by its replicas, one replica for each guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ostinato.engine.process.messages import CompileGuide, EngineReply
from ostinato.engine.replicas.messages import ReplicaLink


class GuideChecks:
    """Compile calls that are not answered yet. Each goes to the replica with the fewest.

    A replica only checks whether the guide can be compiled, and does not keep it. Without any replica a call waits.
    """

    def __init__(self, taking: Callable[[], Mapping[str, ReplicaLink]], answer: Callable[[EngineReply], None]) -> None:
        """Create an empty table. `taking` gives the replicas that take new requests."""
        self._taking, self._answer = taking, answer
        self._waiting: dict[str, tuple[CompileGuide, str | None]] = {}
        """Messages by call, with the replica that each was sent to."""

    def ask(self, message: CompileGuide) -> None:
        """Send a guide to a replica to be compiled."""
        links = self._taking()
        counts = dict.fromkeys(links, 0)
        for _, name in self._waiting.values():
            if name in counts:
                counts[name] += 1
        chosen = min(counts, key=lambda name: counts[name], default=None)
        self._waiting[message.call_id] = message, chosen
        if chosen is not None:
            links[chosen].send(message)

    def take(self, reply: EngineReply) -> bool:
        """Pass on a replica's answer, and return True, if it answers one of these calls."""
        if self._waiting.pop(reply.call_id, None) is None:
            return False
        self._answer(reply)
        return True

    def ask_again(self, lost: str | None = None) -> None:
        """Send the calls of the `lost` replica to another one; with None, the calls that no replica was there for."""
        for message, where in list(self._waiting.values()):
            if where == lost:
                self.ask(message)
