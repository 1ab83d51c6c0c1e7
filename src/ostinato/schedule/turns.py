"""Turns between clients: who came with many requests waits behind the first of those who came with few.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with requests of one size: a request gets a turn when it arrives, the
one after the last of its client, but none that has passed already.
"""

from __future__ import annotations

from collections.abc import Hashable


class Turns:
    """Gives each arrival its turn. Lower turns are served first; of equals, the earlier arrival."""

    def __init__(self) -> None:
        self._now = 0
        self._next: dict[Hashable, int] = {}
        """Client -> the turn of its next arrival, if that lies ahead."""
        self._prune_at = 64

    def take(self, client: Hashable) -> int:
        """The turn of an arrival."""
        turn = max(self._now, self._next.get(client, 0))
        self._next[client] = turn + 1
        if len(self._next) > self._prune_at:
            self._next = {each: following for each, following in self._next.items() if following > self._now}
            self._prune_at = max(64, 2 * len(self._next))
        return turn

    def started(self, turn: int) -> None:
        """One with this turn is being served."""
        self._now = max(self._now, turn)

    @property
    def now(self) -> int:
        """The turn that is being served."""
        return self._now

    @property
    def num_known(self) -> int:
        """Clients that are remembered: at most twice as many as have turns ahead, or 64."""
        return len(self._next)
