"""Decode rows: the block of each request's next token, preemption, and the room for drafts."""

from __future__ import annotations

from ostinato.cache.manager import CacheManager
from ostinato.observe.counts import SchedulerCounts
from ostinato.schedule.batch import Row
from ostinato.schedule.flight import Flight
from ostinato.schedule.queues import Queues
from ostinato.schedule.request import Request, is_decoding, make_row


class Decoding:
    """Allocator of the next blocks of decoding requests, in order of rank; it preempts from the other end."""

    def __init__(self, cache: CacheManager, queues: Queues, flight: Flight, counters: SchedulerCounts) -> None:
        self._cache, self._queues, self._flight, self._counters = cache, queues, flight, counters

    def with_room(self, most: int) -> list[Request]:
        """Return the first `most` requests that decode and have the block of their next token."""
        found: list[Request] = []
        index = 0
        # Preemption shortens the list only after `index` or at it, so no request that has room loses it.
        while index < len(self._queues.running) and len(found) < most:
            request = self._queues.running[index]
            index += 1
            if is_decoding(request) and (
                self._cache.grow(request.request_id, request.num_tokens) or self._make_room(request)
            ):
                found.append(request)
        return found

    def preempt(self, request: Request) -> None:
        """Free a running request's memory; it waits, with its outputs, to compute all its tokens again."""
        self._queues.put_back(request)
        self._counters.preemptions += 1
        self._counters.recomputed_tokens += request.num_computed_tokens
        self._flight.release(request.request_id)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.placement = None

    def _make_room(self, request: Request) -> bool:
        """Make room for the next token's block of `request`; return False if the request was preempted itself.

        Blocks that are held for drafts alone are freed before.
        """
        cache, running = self._cache, self._queues.running
        while not cache.grow(request.request_id, request.num_tokens):
            if any(cache.shrink(each.request_id, each.num_tokens) for each in reversed(running)):
                continue
            victim = running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True


def decode_row(request: Request, cache: CacheManager, num_drafts: int, spare_slots: int) -> Row | None:
    """Return the row of a decoding request with up to `num_drafts` drafts; None if it must wait for a slot.

    The request has the block of its token. No checkpoint takes one of the last `spare_slots` slots.
    """
    if not cache.take_write_slots(request.request_id, spare_slots):
        return None
    num_drafts = _room_for_drafts(request, cache, num_drafts) if num_drafts else 0
    if cache.panes is not None:
        cache.cover(request.request_id, request.num_tokens + num_drafts)
    return make_row(request, cache.holding(request.request_id), 1, num_drafts)


def _room_for_drafts(request: Request, cache: CacheManager, num_drafts: int) -> int:
    """Return how many of `num_drafts` drafts a decoding request can have.

    It gets none that its length would cut off anyway, and no more than it has write slots and can get blocks for. No
    request is preempted for a draft.
    """
    count = min(num_drafts, request.max_num_tokens - request.num_tokens - 1)
    holding = cache.holding(request.request_id)
    if holding.slots:
        count = min(count, len(holding.slots) - 1)
    count = min(count, cache.most_tokens(request.request_id) - request.num_tokens)
    has_grown = cache.grow(request.request_id, request.num_tokens + count)
    assert has_grown, "available blocks were counted above"
    return count
