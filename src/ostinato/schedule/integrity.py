"""Invariants of a scheduler between two calls."""

from __future__ import annotations

from collections.abc import Collection

from ostinato.cache.manager import CacheManager
from ostinato.schedule.media import EncoderScheduler
from ostinato.schedule.queues import RequestQueues


def check_scheduler_integrity(
    queues: RequestQueues,
    cache: CacheManager,
    media: EncoderScheduler | None,
    max_num_seqs: int,
    is_in_flight: bool,
    ended_in_flight: Collection[str],
) -> None:
    """Raise AssertionError unless queues, requests and caches agree with each other.

    `is_in_flight`: whether there is a step in flight; `ended_in_flight` are the ids of the requests that ended since
    it was scheduled.
    """
    cache.check_integrity()
    if media is not None:
        media.check_integrity(queues.running, is_in_flight, ended_in_flight)
    queues.check_integrity()
    assert len(queues.running) <= max_num_seqs, "more requests run than may"
    for request in queues.waiting:
        assert request.num_computed_tokens == 0, f"request {request.request_id} waits with computed tokens"
    for request in queues.requests.values():
        num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        assert request.num_tokens == num_known, f"request {request.request_id} has lost count of its tokens"
    for request in queues.running:
        assert request.kv_snapshot is None, f"request {request.request_id} runs, and keeps what was carried to it"
        assert request.num_computed_tokens < request.num_tokens, f"request {request.request_id} has nothing to compute"
        assert request.num_computed_tokens <= cache.request_cache(request.request_id).capacity, (
            f"request {request.request_id} has computed tokens without a block"
        )
    holders = {request.request_id for request in queues.running} | set(ended_in_flight)
    assert cache.request_ids() == holders, "memory is held by a request that neither runs nor is in flight"
    assert is_in_flight or not ended_in_flight, "memory of ended requests was kept"
