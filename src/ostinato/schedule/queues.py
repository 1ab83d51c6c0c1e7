"""Who waits and who runs, in order of service."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ostinato.schedule.request import Request, RequestStatus
from ostinato.schedule.turns import Turns

_rank = attrgetter("rank")


class Queues:
    """The unfinished requests, each in one of two lists, which are sorted by rank. For reading; only this class changes
    them."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        """Of both, by their ids."""
        self._num_arrived = 0
        self._turns = Turns()

    def arrive(self, request: Request, by_priority: bool) -> None:
        """A new request waits: in the turn of its client among those of its priority, or among all. One that has begun
        elsewhere takes the turn that is being served, and so stands behind those who run and before those who wait for
        a turn of their own."""
        request.arrival = self._num_arrived
        priority = request.priority if by_priority else 0
        turn = self._turns.now if request.has_begun else self._turns.take(request.client)
        request.rank = (priority, turn, request.arrival)
        self._num_arrived += 1
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def start(self) -> None:
        """The first that waits runs."""
        request = self.waiting.pop(0)
        request.status = RequestStatus.RUNNING
        self._turns.started(request.rank[1])
        insort(self.running, request, key=_rank)

    def put_back(self, request: Request) -> None:
        """One that runs waits again."""
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> bool:
        """One is finished; whether it ran."""
        is_running = request.status is RequestStatus.RUNNING
        queue = self.running if is_running else self.waiting
        del queue[bisect_left(queue, request.rank, key=_rank)]
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        return is_running

    def check_integrity(self) -> None:
        """Raise AssertionError unless lists and requests agree with each other."""
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(set(ranks)), f"the {status} requests are not in order of rank"
            for request in queue:
                assert request.status is status, f"request {request.request_id} is {request.status}, not {status}"
                assert self.requests.get(request.request_id) is request, "a queue holds an unknown request"
        assert len(self.waiting) + len(self.running) == len(self.requests), "a request is in no queue"
