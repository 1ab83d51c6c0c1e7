"""Guides that a front has compiled, each by one replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ostinato.engine.process.messages import Compile, Reply
from ostinato.engine.replicas.messages import Link


class Compiles:
    """Each goes to whichever replica has the fewest: it is asked whether the guide can be compiled, not to keep it.
    Without any it waits."""

    def __init__(self, taking: Callable[[], Mapping[str, Link]], answer: Callable[[Reply], None]) -> None:
        """`taking` gives the replicas that take new requests."""
        self._taking, self._answer = taking, answer
        self._waiting: dict[str, tuple[Compile, str | None]] = {}
        """By call: the message, and the replica that it was sent to."""

    def ask(self, message: Compile) -> None:
        """Has a guide compiled."""
        links = self._taking()
        counts = dict.fromkeys(links, 0)
        for _, name in self._waiting.values():
            if name in counts:
                counts[name] += 1
        chosen = min(counts, key=lambda name: counts[name], default=None)
        self._waiting[message.call_id] = message, chosen
        if chosen is not None:
            links[chosen].send(message)

    def take(self, reply: Reply) -> bool:
        """Whether a replica's answer is to one of these."""
        if self._waiting.pop(reply.call_id, None) is None:
            return False
        self._answer(reply)
        return True

    def ask_again(self, lost: str | None = None) -> None:
        """Asks another one for what was `lost`'s; None: for what nobody was there for."""
        for message, where in list(self._waiting.values()):
            if where == lost:
                self.ask(message)
