"""Fair share between clients: a client with many requests waits behind the first ones of clients with few.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with requests of one size: a request gets a start tag (`turn`) when it
arrives, one after the last of its client, but none that has passed already. For a client of weight w it is 1 / w after
the last.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self


class Client(str):
    """A client's name, which identifies it, and the number of its requests that are served for one of others."""

    weight: int

    def __new__(cls, name: str, weight: int = 1) -> Self:
        client = super().__new__(cls, name)
        client.weight = weight
        return client


def client_weight(client: Hashable) -> int:
    """Return the client's weight, or 1 for a request without a `Client`."""
    return client.weight if isinstance(client, Client) else 1


def weighted_share(share: int, most: int, client: Hashable) -> int:
    """Return how much of `most` a client may have if a client of weight 1 may have `share`.

    It is `share` times the weight, but leaves room for another client's share.
    """
    return max(share, min(share * client_weight(client), most - share))


class FairShare:
    """Allocator of start tags. Lower tags are served first; of equals, the earlier arrival."""

    def __init__(self) -> None:
        self._now: float = 0
        self._next: dict[Hashable, float] = {}
        """The start tag of each client's next arrival, if it is later than the present one."""
        self._prune_at = 64

    def assign(self, client: Hashable) -> float:
        """Return the start tag of an arrival."""
        turn = max(self._now, self._next.get(client, 0))
        self._next[client] = turn + 1 / client_weight(client)
        if len(self._next) > self._prune_at:
            self._next = {each: following for each, following in self._next.items() if following > self._now}
            self._prune_at = max(64, 2 * len(self._next))
        return turn

    def advance(self, turn: float) -> None:
        """Note that a request with this start tag is being served."""
        self._now = max(self._now, turn)

    @property
    def current(self) -> float:
        """The start tag that is being served."""
        return self._now

    @property
    def num_known(self) -> int:
        """Clients that are remembered: at most twice as many as have tags ahead, or 64."""
        return len(self._next)
