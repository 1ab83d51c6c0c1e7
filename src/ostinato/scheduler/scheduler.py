"""The scheduler: it chooses the tokens of each step, and applies the step's result to the requests.

`check_integrity` tests the invariants between two calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from ostinato.errors import RequestError
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.manager import CacheManager
from ostinato.observe.counts import MigrationCounts, PrefixCounts, SchedulerCounts
from ostinato.scheduler.batch import Batch, BatchRow, StepResult
from ostinato.scheduler.decode import (
    DecodeScheduler,
    InFlightStep,
    InFlightSteps,
    OverlapBlocker,
    continuing_requests,
    make_decode_row,
    next_step_row,
)
from ostinato.scheduler.encoder_scheduler import EncoderScheduler
from ostinato.scheduler.limits import SchedulerLimits, check_servable, max_total_tokens
from ostinato.scheduler.prefill import Admission, PrefillScheduler
from ostinato.scheduler.request import FinishReason, Request, RequestStatus, RequestUpdate, check_result, is_decoding
from ostinato.scheduler.request_queues import RequestQueues


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
        assert request.kv_snapshot is None, f"request {request.request_id} is running and still has its KV snapshot"
        assert request.num_computed_tokens < request.num_tokens, f"request {request.request_id} has nothing to compute"
        assert request.num_computed_tokens <= cache.request_cache(request.request_id).capacity, (
            f"request {request.request_id} has computed tokens without a block"
        )
    holders = {request.request_id for request in queues.running} | set(ended_in_flight)
    assert cache.request_ids() == holders, "a request that is neither running nor in flight holds memory"
    assert is_in_flight or not ended_in_flight, "memory of ended requests was kept"


log = logging.getLogger("ostinato.scheduler")

_NO_PREFIX_CACHE = PrefixCachePolicy()

ChooseNumDrafts = Callable[[int], int]
"""Function (decoding requests of the next step, as far as known) -> drafts for each of them."""


class Scheduler:
    """Continuous batching over a bounded cache.

    One step at a time, from one thread:

        batch = schedule() -> run it -> update(result), or fail(batch, error)

    or overlapped: while a step is in flight, `schedule_ahead()` returns the next one, and `update` and `fail` are for
    the first of the two.

    `add`, `abort` and `finish` may be called at any time, also while a step is in flight.

    Order of service is `Request.service_order`. A step holds one token of every request that is decoding, with drafts
    after it, then prompt chunks of running requests, then of waiting ones. On admission a request gets its prefix cache
    hit, and blocks for all tokens that it knows, so only decoding makes it grow. If no block is available for that, the
    running request that is last in rank is preempted, possibly the one that grows: it loses its memory and waits, with
    its outputs, to compute all its tokens again. So for memory the first in rank is never preempted for another, and
    alone it always fits, because `add` refuses what does not: every step has a row, and a request waits for ever only
    for those that rank before it. No running request is preempted for a draft; for a waiting one, only if that one's
    client has fewer rows than its share and its own client more (`RequestQueues`). Cached entries make room for all. A
    step's results are committed to the index in `update`, so only if the step succeeded.

    Without chunked prefill a prompt waits until it fits into a step whole. The one exception is a preempted request
    whose prompt and outputs have outgrown `max_num_batched_tokens`, or one that has come from another engine so: it is
    computed again in chunks, since no step may exceed that budget, and `counters.cut_recomputations` says so.

    For images, see `EncoderScheduler`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        policy: PrefixCachePolicy = _NO_PREFIX_CACHE,
        choose_drafts: ChooseNumDrafts | None = None,
        encoder_cache: EncoderCache | None = None,
    ) -> None:
        """Set up an empty scheduler. `encoder_cache` is for models that take images."""
        self.choose_drafts = choose_drafts
        """Function that chooses the drafts of the next step; None without speculation."""
        self.num_drafts_asked = 0
        """The last number that it returned."""
        self.limits = limits
        self.cache = cache
        self.counters = SchedulerCounts(
            finished=dict.fromkeys((reason.value for reason in FinishReason), 0),
            steps_not_ahead=dict.fromkeys((cause.value for cause in OverlapBlocker), 0),
        )
        self.queues = RequestQueues()
        self.encoder_cache = encoder_cache
        self._media = EncoderScheduler(encoder_cache) if encoder_cache is not None else None
        self._admission = Admission(limits, cache, policy, self.queues, self._media, self.counters)
        self._prefill = PrefillScheduler(limits, cache, self.queues, self._media)
        self._in_flight_steps = InFlightSteps(cache, encoder_cache)
        self._decoding = DecodeScheduler(cache, self.queues, self._in_flight_steps, self.counters)

    @property
    def prefix_counters(self) -> PrefixCounts:
        return self._admission.prefix_counters

    @property
    def migration_counts(self) -> MigrationCounts:
        """Counts of requests migrated to other engines, or from them."""
        return self._admission.moves

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queues.requests)

    def is_in_flight(self, batch: Batch) -> bool:
        """Return whether `batch` was scheduled and is neither updated nor failed."""
        return self._in_flight_steps.has(batch)

    def is_memory_in_use(self, request_id: str) -> bool:
        """Return whether a request of this id has ended, and a step in flight still writes to its memory."""
        return request_id in self._in_flight_steps.delayed_request_ids

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    def add(self, request: Request) -> None:
        """Add `request` to the waiting ones.

        Raises RequestError, and changes nothing, if it could never be served (see `check_servable`), or if its id is in
        use, which it is until the request has ended and no step in flight writes for it.
        """
        if request.request_id in self.queues.requests or self.is_memory_in_use(request.request_id):
            raise RequestError(f"the request id {request.request_id!r} is in use; choose another one")
        check_servable(request, self.limits, self.cache, self.encoder_cache)
        request.max_num_tokens = max_total_tokens(request, self.limits)
        if request.marks or self.cache.store.pins.pinned:
            self.cache.store.pins.advance(request.arrival)
        self.queues.add(request, by_priority=self.limits.policy == "priority")

    def schedule(self) -> Batch:
        """Choose the next step and give its rows their memory.

        The batch has at least one row while a request is unfinished. One without rows is not in flight: it
        needs no `update`. A row's block table may be longer than the row needs.
        """
        assert not self._in_flight_steps, "the last step needs update() or fail() before the next is scheduled"
        while self.queues.waiting and (request := self._admission.row_to_yield()) is not None:
            request.min_tokens_to_yield = 2 * request.num_tokens
            self._decoding.preempt(request)
            self.counters.yielded_rows += 1
        num_drafts = self._num_drafts()
        if self._media is not None:
            self._media.begin_step()
        decoding = self._schedule_decoding(num_drafts)
        if self.queues.waiting or len(decoding) < len(self.queues.running):
            self._prefill.begin_step(is_decoding=bool(decoding))
        budget = self.limits.max_num_batched_tokens - len(decoding) * (1 + num_drafts)
        prompts: list[tuple[Request, BatchRow]] = []
        has_prompts = len(decoding) < len(self.queues.running)
        reserved = self._tokens_to_reserve(budget) if has_prompts and self.queues.waiting else 0
        for request in self.queues.running if has_prompts else ():
            if budget > reserved and not is_decoding(request):
                row = self._prefill.next_row(request, budget - reserved, num_drafts, self._spare_slots())
                if row is not None:
                    budget -= len(row.token_ids)
                    prompts.append((request, row))
        admitted = self._admit(budget, num_drafts) if self.queues.waiting else []
        # If all but a prompt's last token is cached, that one is computed as if it were decoding.
        decoding += [pair for pair in admitted if is_decoding(pair[0])]
        prompts += [pair for pair in admitted if not is_decoding(pair[0])]
        scheduled = decoding + prompts
        has_drafts = num_drafts > 0 and any(row.num_drafts for _, row in decoding)
        batch = Batch(
            tuple([row for _, row in scheduled]),
            len(decoding),
            num_drafts if has_drafts else 0,
            tuple([request.request_id for request, _ in admitted if not request.num_preemptions]),
            self._media.to_encode() if self._media is not None else (),
        )
        assert batch.rows or not self.queues.requests, "no row was scheduled although requests are unfinished"
        if batch.rows:
            self._in_flight_steps.add(InFlightStep(batch, [request for request, _ in scheduled]))
            self.counters.steps += 1
        if log.isEnabledFor(logging.DEBUG):
            self._log_step(batch)
        return batch

    def schedule_ahead(self) -> Batch | None:
        """Schedule the next step, with its memory, before the one in flight is over.

        It has a token of each request that continues. If the step in flight ends the request, its row is void.

        Returns None if no request continues, or if the step has to wait, which is counted with its cause
        (`OverlapBlocker`). No request is admitted or preempted here.
        """
        assert len(self._in_flight_steps) == 1, "a step ahead is behind the one step that is in flight"
        assert self.choose_drafts is None, "how many drafts are accepted is not known ahead"
        admission, waiting = self._admission, bool(self.queues.waiting)
        continuing = continuing_requests(
            self._in_flight_steps.first,
            self.queues,
            self.limits.max_num_seqs,
            has_refused=waiting and admission.is_head_blocked(),
            must_yield=waiting and admission.row_to_yield() is not None,
        )
        if not isinstance(continuing, OverlapBlocker) and not all(
            self.cache.grow(request.request_id, request.num_tokens + 1) for _, request in continuing
        ):
            continuing = OverlapBlocker.MEMORY
        if isinstance(continuing, OverlapBlocker):
            self.counters.steps_not_ahead[continuing] += 1
            return None
        if not continuing:
            return None
        spare_slots = self._spare_slots()
        rows = [next_step_row(request, self.cache, row_index, spare_slots) for row_index, request in continuing]
        batch = Batch(tuple(rows), len(rows))
        self._in_flight_steps.add(InFlightStep(batch, [request for _, request in continuing], is_ahead=True))
        self.counters.steps += 1
        self.counters.steps_ahead += 1
        if log.isEnabledFor(logging.DEBUG):
            self._log_step(batch)
        return batch

    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Apply the result of the (first) step in flight; return an update for each request that has an output delta.

        Several tokens per row are allowed; those after the one that ends a request are dropped. A row with an error
        ends its request. Results for requests that ended meanwhile are ignored. AssertionError if the result does not
        match the batch; nothing is changed then, so the step can still be failed.
        """
        in_flight = self._in_flight_steps.first
        batch = in_flight.batch
        assert len(result.rows) == len(batch.rows), "the result has another number of rows than the batch"
        results = list(zip(in_flight.requests, batch.rows, result.rows, strict=True))
        for request, row, row_result in results:
            check_result(request, row, row_result)
        self._in_flight_steps.finish_first()
        if self.encoder_cache is not None:
            self.encoder_cache.finish_step(succeeded=True)
        if batch.num_decode_rows < len(batch.rows):
            self._admission.retry_head()
        updates = []
        for request, row, row_result in results:
            if request.status is RequestStatus.FINISHED:
                self.counters.void_rows += in_flight.is_ahead
                continue
            if row_result.error is not None:
                updates.append(self._finish_with_error(request, row_result.error))
                continue
            if row_result.prompt_logprobs:
                request.num_prompt_logprobs += len(row_result.prompt_logprobs)
            if not row.samples:
                request.num_computed_tokens = row.end
                self._commit_row(request, row)
                if row_result.prompt_logprobs:
                    updates.append(RequestUpdate(request.request_id, prompt_logprobs=row_result.prompt_logprobs))
                continue
            num_kept, reason = request.append_outputs(row_result.token_ids, row_result.grammar_ended)
            request.num_computed_tokens = request.num_tokens - 1
            self._commit_row(request, row, num_accepted=num_kept - 1)
            if reason is not None:
                self._finish(request, reason)
            updates.append(
                RequestUpdate(
                    request.request_id,
                    row_result.token_ids[:num_kept],
                    None if row_result.logprobs is None else row_result.logprobs[:num_kept],
                    row_result.prompt_logprobs,
                    reason,
                    request.stop_reason,
                )
            )
        if self._media is not None:
            self._media.unpin_finished()
        return updates

    def fail(self, batch: Batch, error: Exception) -> list[RequestUpdate]:
        """End the requests of the (first) step in flight, which raised `error`, and free their memory.

        State is written in place, so the step cannot be run again. Requests that were not in it continue. An overlapped
        step has no other requests: it is over too, and all its rows are void.
        """
        assert self._in_flight_steps, "only a step in flight can fail"
        failed = self._in_flight_steps.first
        assert batch is failed.batch, "only the first step in flight can fail"
        self.counters.void_rows += sum(len(later.requests) for later in self._in_flight_steps if later is not failed)
        self._in_flight_steps.finish_all()
        self.counters.failed_steps += 1
        updates = []
        for request in failed.requests:
            if request.status is not RequestStatus.FINISHED:
                updates.append(self._finish_with_error(request, error))
        if self.encoder_cache is not None:
            self.encoder_cache.finish_step(succeeded=False)
        return updates

    def abort(self, request_id: str) -> bool:
        """End a request whose output is not wanted any more; return False if none of that id is unfinished."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason found outside, such as a stop string; return False if it is not unfinished.

        If a step in flight computes it, the result is ignored and the memory is freed when the step is over.
        """
        request = self.queues.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def preempt(self, request_id: str) -> bool:
        """Preempt a request between two steps, as lack of memory would; return False if it is not running."""
        assert not self._in_flight_steps, "a request cannot lose its memory while a step writes to it"
        request = self.queues.requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return False
        self._decoding.preempt(request)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, requests and caches agree with each other."""
        max_running, is_in_flight = self.limits.max_num_seqs, bool(self._in_flight_steps)
        check_scheduler_integrity(
            self.queues, self.cache, self._media, max_running, is_in_flight, self._in_flight_steps.delayed_request_ids
        )

    def _num_drafts(self) -> int:
        """Return the drafts of each row that decodes in the next step, as `ChooseNumDrafts` chooses them."""
        if self.choose_drafts is None:
            return 0
        # A waiting request decodes as soon as it is admitted, if all but its last token is cached.
        rows = max(sum(map(is_decoding, self.queues.running)), min(1, len(self.queues.waiting)))
        self.num_drafts_asked = self.choose_drafts(rows)
        return self.num_drafts_asked

    def _tokens_to_reserve(self, budget: int) -> int:
        """Return how many of a step's `budget` tokens running prompts leave to requests that this step can admit."""
        limits, queues = self.limits, self.queues
        # What a step computes whole, a prompt or an image, may need all of it.
        if not limits.enable_chunked_prefill or limits.whole_images or len(queues.running) >= limits.max_num_seqs:
            return 0
        return 0 if self._admission.is_head_blocked() else queues.tokens_to_reserve(budget)

    def _schedule_decoding(self, num_drafts: int) -> list[tuple[Request, BatchRow]]:
        """Return a row for each request that is decoding, in order of rank."""
        with_room = self._decoding.ready_requests(self.limits.max_num_batched_tokens // (1 + num_drafts))
        # Drafts get what is left when every request has the block of its next token.
        spare_slots = self._spare_slots()
        rows = [(request, make_decode_row(request, self.cache, num_drafts, spare_slots)) for request in with_room]
        return [(request, row) for request, row in rows if row is not None]

    def _spare_slots(self) -> int:
        """Return the slots that no checkpoint may take, so that the next request can be admitted."""
        can_admit = self.queues.waiting and len(self.queues.running) < self.limits.max_num_seqs
        return self.cache.state_slots.slots_per_request if can_admit else 0

    def _admit(self, budget: int, num_drafts: int) -> list[tuple[Request, BatchRow]]:
        """Admit waiting requests to a step with room for `budget` more tokens, and return their rows."""
        admitted: list[tuple[Request, BatchRow]] = []
        if budget <= 0 or len(self.queues.running) >= self.limits.max_num_seqs:
            return admitted
        # Kept up to date below: to look at all running requests for each that is admitted would take their square.
        growing = self._admission.growing_requests()
        while (request := self._admission.admit_next(budget, num_drafts, growing)) is not None:
            if is_decoding(request):
                row = make_decode_row(request, self.cache, num_drafts, self._spare_slots())
                budget -= 1 + num_drafts
            else:
                row = self._prefill.next_row(request, budget, num_drafts, self._spare_slots(), is_new=True)
                budget -= len(row.token_ids) if row is not None else 0
            assert row is not None, "the slots of a request are taken when it is admitted"
            admitted.append((request, row))
            if self._admission.may_need_blocks(request):
                growing.append(request)
        return admitted

    def _log_step(self, batch: Batch) -> None:
        """Log what a step has, and why the first waiting request is not in it."""
        tokens = sum(len(row.token_ids) + row.num_drafts for row in batch.rows)
        log.debug(
            "step %d: %d decoding and %d prompt rows, %d tokens; %d requests run, %d wait",
            *(self.counters.steps, batch.num_decode_rows, len(batch.rows) - batch.num_decode_rows, tokens),
            *(self.num_running, self.num_waiting),
        )
        if self.queues.waiting:
            why = self._admission.reason_to_wait(self.limits.max_num_batched_tokens - tokens)
            log.debug("request %s waits: %s", self.queues.next_waiting().request_id, why)

    def _commit_row(self, request: Request, row: BatchRow, num_accepted: int = 0) -> None:
        """Commit the results of the step that computed `row`, so that other requests can share them.

        The step succeeded, and `num_accepted` of the row's drafts were accepted.
        """
        cache, id = self.cache, request.request_id
        cache.accept_state(id, num_accepted)
        if request.block_hashes is not None and cache.has_full_block(id, request.num_computed_tokens):
            assert request.checkpoint_positions is not None, "a running request knows where its checkpoints go"
            request.block_hashes.extend(request.tokens, request.num_computed_tokens)
            cache.commit(
                id,
                request.block_hashes,
                request.num_computed_tokens,
                request.checkpoint_positions,
                reaches_end=row.samples,
                num_accepted=num_accepted,
            )
            request.update_cache_report()
        cache.use_next_slots(id)
        if cache.window_blocks is not None:
            cache.free_outside_window(id, request.num_computed_tokens)

    def _finish_with_error(self, request: Request, error: Exception) -> RequestUpdate:
        self._finish(request, FinishReason.ERROR)
        return RequestUpdate(request.request_id, finish_reason=FinishReason.ERROR, error=error)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Remove `request`; its memory is freed now, or after a step in flight, which may write to it."""
        if self.queues.remove(request):
            self._in_flight_steps.free(request.request_id, reason is FinishReason.ERROR)
        request.finish_reason = reason
        self.counters.finished[reason] += 1
