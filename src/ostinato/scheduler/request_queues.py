"""The waiting and the running requests, in order of service, with fair share between clients.

A client with many requests waits behind the first ones of clients with few. It is start-time fair queueing (Goyal, Vin,
Cheng 1996) with requests of one size: a request gets a start tag when it arrives, one after the last of its client, but
none that has passed already. For a client of weight w it is 1 / w after the last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from operator import attrgetter
from typing import Self

from ostinato.scheduler.request import Request, RequestStatus


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


def weighted_share(share: int, max_share: int, client: Hashable) -> int:
    """Return how much of `max_share` a client may have if a client of weight 1 may have `share`.

    It is `share` times the weight, but leaves room for another client's share.
    """
    return max(share, min(share * client_weight(client), max_share - share))


class FairShare:
    """Allocator of start tags. Lower tags are served first; of equals, the earlier arrival."""

    def __init__(self) -> None:
        self._now: float = 0
        self._next: dict[Hashable, float] = {}
        """The start tag of each client's next arrival, if it is later than the present one."""
        self._prune_at = 64

    def assign(self, client: Hashable) -> float:
        """Return the start tag of an arrival."""
        start_tag = max(self._now, self._next.get(client, 0))
        self._next[client] = start_tag + 1 / client_weight(client)
        if len(self._next) > self._prune_at:
            self._next = {name: next_tag for name, next_tag in self._next.items() if next_tag > self._now}
            self._prune_at = max(64, 2 * len(self._next))
        return start_tag

    def advance(self, start_tag: float) -> None:
        """Note that a request with this start tag is being served."""
        self._now = max(self._now, start_tag)

    @property
    def current(self) -> float:
        """The start tag that is being served."""
        return self._now

    @property
    def num_known(self) -> int:
        """Clients that are remembered: at most twice as many as have tags ahead, or 64."""
        return len(self._next)


_rank = attrgetter("service_order")


class RequestQueues:
    """The unfinished requests, in a waiting and a running list, each sorted by rank.

    The lists are for reading; only this class changes them.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """All waiting and running requests, by their ids."""
        self._num_arrived = 0
        self._fair_share = FairShare()

    def add(self, request: Request, by_priority: bool) -> None:
        """Add a new request to the waiting list, at its client's fair share among those of its priority, or among all.

        A request that has begun elsewhere takes the start tag that is being served, and so comes after the running
        requests and before those that wait with a later tag.
        """
        request.arrival_number = self._num_arrived
        priority = request.priority if by_priority else 0
        start_tag = self._fair_share.current if request.was_imported else self._fair_share.assign(request.client)
        request.service_order = (priority, start_tag, request.arrival_number)
        self._num_arrived += 1
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def start_first(self) -> None:
        """Move the first waiting request to the running list."""
        request = self.waiting.pop(0)
        request.status = RequestStatus.RUNNING
        self._fair_share.advance(request.service_order[1])
        insort(self.running, request, key=_rank)

    def requeue(self, request: Request) -> None:
        """Move a running request back to the waiting list."""
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> bool:
        """Remove a finished request; return whether it ran."""
        is_running = request.status is RequestStatus.RUNNING
        queue = self.running if is_running else self.waiting
        del queue[bisect_left(queue, request.service_order, key=_rank)]
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        return is_running

    def check_integrity(self) -> None:
        """Raise AssertionError unless lists and requests agree with each other."""
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            ranks = [request.service_order for request in queue]
            assert ranks == sorted(set(ranks)), f"the {status} requests are not in order of rank"
            for request in queue:
                assert request.status is status, f"request {request.request_id} is {request.status}, not {status}"
                assert self.requests.get(request.request_id) is request, "a queue holds an unknown request"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request is in no queue"
