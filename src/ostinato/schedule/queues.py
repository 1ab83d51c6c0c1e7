"""The waiting and the running requests, in order of service."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from ostinato.schedule.request import Request, RequestStatus
from ostinato.schedule.turns import FairShare

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
        self._turns = FairShare()

    def add(self, request: Request, by_priority: bool) -> None:
        """Add a new request to the waiting list, at its client's fair share among those of its priority, or among all.

        A request that has begun elsewhere takes the start tag that is being served, and so comes after the running
        requests and before those that wait with a later tag.
        """
        request.arrival_number = self._num_arrived
        priority = request.priority if by_priority else 0
        turn = self._turns.current if request.was_imported else self._turns.assign(request.client)
        request.service_order = (priority, turn, request.arrival_number)
        self._num_arrived += 1
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def start_first(self) -> None:
        """Move the first waiting request to the running list."""
        request = self.waiting.pop(0)
        request.status = RequestStatus.RUNNING
        self._turns.advance(request.service_order[1])
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
