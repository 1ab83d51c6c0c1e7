"""What must hold between two calls of a scheduler, whatever it was asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ostinato.cache.manager import CacheManager
from ostinato.schedule.request import Request, RequestStatus


@dataclass(frozen=True)
class Queues:
    """Who waits and who runs, in order of rank, of all `requests` by their ids; whether a step is in flight, and the
    ids of those that ended since it was scheduled."""

    waiting: Sequence[Request]
    running: Sequence[Request]
    requests: Mapping[str, Request]
    is_in_flight: bool
    ended_in_flight: Collection[str]


def check_integrity(queues: Queues, cache: CacheManager, max_num_seqs: int) -> None:
    """Raise AssertionError unless queues, requests and cache agree with each other."""
    cache.check_integrity()
    for queue, status in (
        (queues.waiting, RequestStatus.WAITING),
        (queues.running, RequestStatus.RUNNING),
    ):
        ranks = [request.rank for request in queue]
        assert ranks == sorted(set(ranks)), f"the {status} requests are not in order of rank"
        for request in queue:
            assert request.status is status, f"request {request.request_id} is {request.status}, not {status}"
            assert queues.requests.get(request.request_id) is request, "a queue holds an unknown request"
    assert len(queues.waiting) + len(queues.running) == len(queues.requests), "a request is in no queue"
    assert len(queues.running) <= max_num_seqs, "more requests run than may"
    for request in queues.waiting:
        assert request.num_computed_tokens == 0, f"request {request.request_id} waits with computed tokens"
    for request in queues.requests.values():
        num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        assert request.num_tokens == num_known, f"request {request.request_id} has lost count of its tokens"
    for request in queues.running:
        assert request.num_computed_tokens < request.num_tokens, f"request {request.request_id} has nothing to compute"
        assert request.num_computed_tokens <= cache.holding(request.request_id).capacity, (
            f"request {request.request_id} has computed tokens without a block"
        )
    holders = {request.request_id for request in queues.running} | set(queues.ended_in_flight)
    assert cache.holders() == holders, "memory is held by a request that neither runs nor is in flight"
    assert queues.is_in_flight or not queues.ended_in_flight, "memory of ended requests was kept"
