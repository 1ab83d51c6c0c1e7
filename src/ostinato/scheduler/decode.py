"""Decode rows: the block of each request's next token, preemption, and the room for drafts; and the steps in flight.

With overlap, the next step's rows are scheduled before the tokens of the step in flight are known. What a request holds
when it ends is freed once no step in flight writes to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.manager import CacheManager
from ostinato.observe.counts import SchedulerCounts
from ostinato.scheduler.batch import Batch, BatchRow
from ostinato.scheduler.request import Request, is_decoding, make_next_step_row, make_row
from ostinato.scheduler.request_queues import RequestQueues


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was scheduled and is not over."""

    batch: Batch
    requests: list[Request]
    is_ahead: bool = False
    """True if it was scheduled before the step before it was over."""


class InFlightSteps:
    """The steps in flight: none, one, or two. It frees what requests hold as soon as no step writes to it."""

    def __init__(self, cache: CacheManager, encoder_cache: EncoderCache | None) -> None:
        self._cache, self._encoder_cache = cache, encoder_cache
        self._steps: list[InFlightStep] = []
        self._ended: dict[str, bool] = {}
        """Requests that hold memory though they have ended, and whether a failed step may have written it."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def first(self) -> InFlightStep:
        """The step that will be over first."""
        assert self._steps, "there is no step in flight"
        return self._steps[0]

    @property
    def delayed_request_ids(self) -> Collection[str]:
        """The ids of requests that have ended, to whose memory a step in flight still writes."""
        return self._ended.keys()

    def has(self, batch: Batch) -> bool:
        return any(step.batch is batch for step in self._steps)

    def add(self, in_flight: InFlightStep) -> None:
        self._steps.append(in_flight)

    def finish_first(self) -> None:
        """Remove the first step, which is over."""
        del self._steps[0]
        if self._ended:
            written = self._written()
            for request_id in [id for id in self._ended if id not in written]:
                self._free_now(request_id, self._ended.pop(request_id))

    def finish_all(self) -> None:
        """Remove the first step, which is over, and the step after it."""
        del self._steps[1:]
        self.finish_first()

    def free(self, request_id: str, may_be_corrupt: bool = False) -> None:
        """Free all that a request holds: now, or after a step in flight that may write to it.

        `may_be_corrupt`: a step that failed may have written it.
        """
        if request_id in self._written():
            self._ended[request_id] = may_be_corrupt
        else:
            self._free_now(request_id, may_be_corrupt)

    def _written(self) -> set[str]:
        """Return the requests to whose memory steps in flight write."""
        return {row.request_id for step in self._steps for row in step.batch.rows}

    def _free_now(self, request_id: str, may_be_corrupt: bool) -> None:
        self._cache.free(request_id)
        if self._encoder_cache is not None:
            self._encoder_cache.unpin_all(request_id, may_be_corrupt)


class DecodeScheduler:
    """Allocator of the next blocks of decoding requests, in order of rank; it preempts from the other end."""

    def __init__(
        self, cache: CacheManager, queues: RequestQueues, in_flight_steps: InFlightSteps, counters: SchedulerCounts
    ) -> None:
        self._cache, self._queues, self._in_flight_steps, self._counters = cache, queues, in_flight_steps, counters

    def ready_requests(self, max_requests: int) -> list[Request]:
        """Return the first `max_requests` requests that decode and have the block of their next token."""
        requests: list[Request] = []
        index = 0
        # Preemption shortens the list only after `index` or at it, so no request that has room loses it.
        while index < len(self._queues.running) and len(requests) < max_requests:
            request = self._queues.running[index]
            if is_decoding(request):
                if not self._cache.grow(request.request_id, request.num_tokens) and not self._preempt_for(request):
                    continue  # it has left the list, and the next one stands at `index`
                requests.append(request)
            index += 1
        return requests

    def preempt(self, request: Request) -> None:
        """Free a running request's memory; it waits, with its outputs, to compute all its tokens again."""
        self._queues.requeue(request)
        self._counters.preemptions += 1
        self._counters.recomputed_tokens += request.num_computed_tokens
        self._in_flight_steps.free(request.request_id)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.checkpoint_positions = None

    def _preempt_for(self, request: Request) -> bool:
        """Make room for the next token's block of `request`; return False if the request was preempted itself.

        Blocks that are held for drafts alone are freed before.
        """
        cache, running = self._cache, self._queues.running
        while not cache.grow(request.request_id, request.num_tokens):
            if any(cache.shrink(other.request_id, other.num_tokens) for other in reversed(running)):
                continue
            index = bisect_left(running, request.service_order, key=lambda other: other.service_order)
            victim = self._queues.newest_above_share(len(running), index) or running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True


def make_decode_row(request: Request, cache: CacheManager, num_drafts: int, spare_slots: int) -> BatchRow | None:
    """Return the row of a decoding request with up to `num_drafts` drafts; None if it must wait for a slot.

    The request has the block of its token. No checkpoint takes one of the last `spare_slots` slots.
    """
    if not cache.allocate_write_slots(request.request_id, spare_slots):
        return None
    num_drafts = _max_drafts(request, cache, num_drafts) if num_drafts else 0
    if cache.window_blocks is not None:
        cache.allocate_window_blocks(request.request_id, request.num_tokens + num_drafts)
    return make_row(request, cache.request_cache(request.request_id), 1, num_drafts)


def _max_drafts(request: Request, cache: CacheManager, num_drafts: int) -> int:
    """Return how many of `num_drafts` drafts a decoding request can have.

    It gets none that its length would cut off anyway, and no more than it has write slots and can get blocks for. No
    request is preempted for a draft.
    """
    count = min(num_drafts, request.max_num_tokens - request.num_tokens - 1)
    request_cache = cache.request_cache(request.request_id)
    if request_cache.write_slots:
        count = min(count, len(request_cache.write_slots) - 1)
    count = min(count, cache.max_growable_tokens(request.request_id) - request.num_tokens)
    has_grown = cache.grow(request.request_id, request.num_tokens + count)
    assert has_grown, "available blocks were counted above"
    return count


class OverlapBlocker(StrEnum):
    """Reasons why a step is not scheduled before the one in flight is over."""

    PROMPT = "prompt"
    """A prompt is not computed to its end, or a running request is not in the step in flight."""
    ADMISSION = "admission"
    """A waiting request may find a batch row, tokens and memory in the next step."""
    TOKEN = "token"
    """Sampling a request's next token depends on the one before: a guide, penalties, `min_tokens`."""
    MEMORY = "memory"
    """A request finds no block for the next token, and none is preempted while a step writes to its memory."""


def continuing_requests(
    in_flight: InFlightStep, queues: RequestQueues, max_num_seqs: int, has_refused: bool, must_yield: bool
) -> list[tuple[int, Request]] | OverlapBlocker:
    """Return the requests that continue after `in_flight`, in order of rank, with the index of their row in it.

    Return the cause instead if the next step has to wait for this one. The next step has decode rows alone, of the
    requests in `in_flight`: each computes the token that is sampled for it there. Requests whose length is complete
    then are left out. `has_refused`: the next waiting request finds no memory unless another one ends.
    `must_yield`: a running request is to be preempted for it.
    """
    if not all(row.samples for row in in_flight.batch.rows):
        return OverlapBlocker.PROMPT
    row_index_of = {row.request_id: row_index for row_index, row in enumerate(in_flight.batch.rows)}
    continuing: list[tuple[int, Request]] = []
    for request in queues.running:
        row_index = row_index_of.get(request.request_id)
        if row_index is None:
            return OverlapBlocker.PROMPT
        if request.num_tokens + 1 < request.max_num_tokens:
            continuing.append((row_index, request))
    if queues.waiting:
        any_ends = len(continuing) < len(queues.running)
        if must_yield or any_ends or (len(queues.running) < max_num_seqs and not has_refused):
            return OverlapBlocker.ADMISSION
    if any(len(request.output_token_ids) < request.num_lookback_outputs for _, request in continuing):
        return OverlapBlocker.TOKEN
    return continuing


def next_step_row(request: Request, cache: CacheManager, row_index: int, spare_slots: int) -> BatchRow:
    """Return the row after row `row_index` of the step in flight. The request has the block of its token.

    No checkpoint takes one of the last `spare_slots` slots.
    """
    id, positions = request.request_id, request.checkpoint_positions
    keeps = request.block_hashes is not None and positions is not None and positions.mode != "none"
    slots = cache.next_step_slots(id, request.num_tokens, keeps, spare_slots)
    if cache.window_blocks is not None:
        cache.allocate_window_blocks(id, request.num_tokens + 1)
    return make_next_step_row(request, row_index, cache.request_cache(id), slots)
