"""Turns between clients: who came with many requests waits behind the first of those who came with few.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with requests of one size: a request gets a turn when it arrives, one
after the last of its client, but none that has passed already. For a client of weight w it is 1 / w after the last.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self


class Client(str):
    """A client's name, which is who it is, and how many requests of it are served for one of others."""

    weight: int

    def __new__(cls, name: str, weight: int = 1) -> Self:
        client = super().__new__(cls, name)
        client.weight = weight
        return client


def weight_of(client: Hashable) -> int:
    """1 for who is no Client."""
    return client.weight if isinstance(client, Client) else 1


def weighted_share(share: int, most: int, client: Hashable) -> int:
    """How much of `most` a client may have, if one of weight 1 may have `share`: so many times that, but with room
    for another client's share."""
    return max(share, min(share * weight_of(client), most - share))


class Turns:
    """Gives each arrival its turn. Lower turns are served first; of equals, the earlier arrival."""

    def __init__(self) -> None:
        self._now: float = 0
        self._next: dict[Hashable, float] = {}
        """Client -> the turn of its next arrival, if that lies ahead."""
        self._prune_at = 64

    def take(self, client: Hashable) -> float:
        """The turn of an arrival."""
        turn = max(self._now, self._next.get(client, 0))
        self._next[client] = turn + 1 / weight_of(client)
        if len(self._next) > self._prune_at:
            self._next = {each: following for each, following in self._next.items() if following > self._now}
            self._prune_at = max(64, 2 * len(self._next))
        return turn

    def started(self, turn: float) -> None:
        """One with this turn is being served."""
        self._now = max(self._now, turn)

    @property
    def now(self) -> float:
        """The turn that is being served."""
        return self._now

    @property
    def num_known(self) -> int:
        """Clients that are remembered: at most twice as many as have turns ahead, or 64."""
        return len(self._next)
