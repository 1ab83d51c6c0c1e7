"""The waiting and the running requests, in order of service, with fair share between clients.

A client with many requests waits behind the first ones of clients with few. It is start-time fair queueing (Goyal, Vin,
Cheng 1996) with requests of one size: a request gets a start tag when it arrives, one after the last of its client, but
none that has passed already. For a client of weight w it is 1 / w after the last.

Among the requests that run, a client's share is the rows in proportion to its weight, and at least one. A client below
its share is admitted before those at theirs, takes rows from the client that is furthest above
(`newest_above_share`), and gets a part of each step that others' prompts would fill (`tokens_to_reserve`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
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


def _share(client: Hashable, rows_per_weight: float) -> float:
    """Return the rows that the client may have before others take them."""
    return max(1.0, rows_per_weight * client_weight(client))


class RequestQueues:
    """Unfinished requests: a waiting and a running list, each sorted by rank, which only this class changes."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """All waiting and running requests, by their ids."""
        self._num_arrived = 0
        self._fair_share = FairShare()
        self._num_waiting: Counter[Hashable] = Counter()
        self._num_running: Counter[Hashable] = Counter()

    def next_waiting(self) -> Request:
        """Return the request to admit next: the first of a client below its share of the rows, else the first."""
        first = self.waiting[0]
        below = self.clients_below_share(len(self.running) + 1)
        if not below or first.client in below:
            return first
        priority = first.service_order[0]
        return next((r for r in self.waiting if r.client in below and r.service_order[0] == priority), first)

    def clients_below_share(self, num_rows: int) -> set[Hashable]:
        """Return the waiting clients with a row less than their share of `num_rows`; none if there is one client."""
        if len(self._num_waiting.keys() | self._num_running.keys()) < 2:
            return set()
        row = self._rows_per_weight(num_rows)
        return {client for client in self._num_waiting if self._num_running[client] + 1 <= _share(client, row)}

    def tokens_to_reserve(self, budget: int) -> int:
        """Return how many of a step's `budget` tokens running prompts leave to waiting clients below their share.

        Those are short prompts, of half of the step at most, that would wait for all of another client's long ones. No
        request of a higher priority may run. Some request must run.
        """
        below, priority = self.clients_below_share(len(self.running) + 1), self.running[0].service_order[0]
        num_reserved = 0
        for request in self.waiting if below else ():
            is_next = request.client in below and request.service_order[0] <= priority
            if is_next and num_reserved + request.num_tokens <= budget // 2:
                num_reserved += request.num_tokens
        return num_reserved

    def newest_above_share(self, num_rows: int, first: int = 0) -> Request | None:
        """Return the newest request, from index `first` of the running ones, of the client furthest above its share.

        A client that loses the row keeps its share of `num_rows`, so it cannot take the row back. A request that was
        preempted so is not preempted so again before it is twice as long: its tokens are computed three times at most.
        """
        row = self._rows_per_weight(num_rows)
        above = {client for client, count in self._num_running.items() if count - 1 >= _share(client, row)}
        newest: dict[Hashable, Request] = {}
        for request in self.running[first:] if above else ():
            if request.client in above and request.num_tokens >= request.min_tokens_to_yield:
                newest[request.client] = request
        return max(newest.values(), key=lambda r: self._num_running[r.client] / _share(r.client, row), default=None)

    def _rows_per_weight(self, num_rows: int) -> float:
        return num_rows / sum(map(client_weight, self._num_waiting.keys() | self._num_running.keys()))

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
        self._insert(request)

    def start(self, request: Request) -> None:
        """Move a waiting request to the running list."""
        self._take_out(request)
        request.status = RequestStatus.RUNNING
        self._fair_share.advance(request.service_order[1])
        self._insert(request)

    def requeue(self, request: Request) -> None:
        """Move a running request back to the waiting list."""
        self._take_out(request)
        request.status = RequestStatus.WAITING
        self._insert(request)

    def remove(self, request: Request) -> bool:
        """Remove a finished request; return whether it ran."""
        is_running = request.status is RequestStatus.RUNNING
        self._take_out(request)
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        return is_running

    def _insert(self, request: Request) -> None:
        queue, counts = self._queue_of(request)
        insort(queue, request, key=_rank)
        counts[request.client] += 1

    def _take_out(self, request: Request) -> None:
        queue, counts = self._queue_of(request)
        del queue[bisect_left(queue, request.service_order, key=_rank)]
        counts[request.client] -= 1
        if not counts[request.client]:
            del counts[request.client]

    def _queue_of(self, request: Request) -> tuple[list[Request], Counter[Hashable]]:
        """Return the list that holds an unfinished request, and that list's requests by client."""
        if request.status is RequestStatus.RUNNING:
            return self.running, self._num_running
        return self.waiting, self._num_waiting

    def check_integrity(self) -> None:
        """Raise AssertionError unless lists and requests agree with each other."""
        counts = {RequestStatus.WAITING: self._num_waiting, RequestStatus.RUNNING: self._num_running}
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            by_client = Counter(request.client for request in queue)
            assert by_client == counts[status], f"the {status} requests are miscounted by client"
            ranks = [request.service_order for request in queue]
            assert ranks == sorted(set(ranks)), f"the {status} requests are not in order of rank"
            for request in queue:
                assert request.status is status, f"request {request.request_id} is {request.status}, not {status}"
                assert self.requests.get(request.request_id) is request, "a queue holds an unknown request"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request is in no queue"
