"""Prefill: admission of waiting requests, and the prompt tokens that a step takes.

Admission looks up the prefix cache, checks memory and makes the cache report. A row of a prompt also needs slots and
images.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ostinato.kv_cache.checkpoints import CheckpointPositions, PrefixCachePolicy, pin_hit_marks, plan_checkpoints
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.offload.save_restore import restore_from_files
from ostinato.kv_cache.prefix_index import BlockHashes, CacheReport, MissCause, explain_misses, whole_prompt_span
from ostinato.kv_cache.request_cache import KVSnapshot
from ostinato.kv_cache.store import Match
from ostinato.observe.counts import MigrationCounts, PrefixCounts, SchedulerCounts
from ostinato.scheduler.batch import BatchRow, MediaUse
from ostinato.scheduler.encoder_scheduler import EncoderScheduler, whole_images_end
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import Request, is_decoding, make_row, num_prompt_logprobs_due
from ostinato.scheduler.request_queues import RequestQueues


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Record that the first waiting request found too little memory with these free blocks, slots and window blocks.

    It is remembered so that a long prompt that waits while others decode is not looked up in the index in each step.
    """

    request: Request
    num_blocks: int
    num_slots: int
    num_window_blocks: int

    def still_holds(self, request: Request, num_blocks: int, num_slots: int, num_window_blocks: int) -> bool:
        """Return whether the same request would find no more memory now.

        The caller accounts for what prompts of other requests have computed meanwhile, which this one may share.
        """
        is_no_more = (
            num_blocks <= self.num_blocks
            and num_slots <= self.num_slots
            and num_window_blocks <= self.num_window_blocks
        )
        return self.request is request and is_no_more


class Admission:
    """Admission of waiting requests, in order of rank: it gives them memory and their prefix cache hit."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        policy: PrefixCachePolicy,
        queues: RequestQueues,
        media: EncoderScheduler | None,
        counters: SchedulerCounts,
    ) -> None:
        self.prefix_counters = PrefixCounts(misses=dict.fromkeys((cause.value for cause in MissCause), 0))
        self.moves = MigrationCounts()
        self._limits = limits
        self._cache = cache
        self._policy = policy
        self._queues = queues
        self._media = media
        self._counters = counters
        self._refusal: _Refusal | None = None

    def admit_next(self, budget: int, num_drafts: int, growing: Collection[Request]) -> Request | None:
        """Admit the next waiting request to a step with room for `budget` more tokens, and return it.

        `growing` are the running requests that may need more blocks (`growing_requests`). Return None if no request
        waits, or if it finds no batch row, too few tokens or no memory. At most something idle was evicted for it then.
        """
        queues, cache, limits = self._queues, self._cache, self._limits
        if not queues.waiting or budget <= 0 or len(queues.running) >= limits.max_num_seqs:
            return None
        request = queues.next_waiting()
        spare_blocks, spare_window_blocks, room = self._available(growing)
        if self._refusal is not None and self._refusal.still_holds(request, *room):
            return None
        match = match_prefix(request, cache, self._policy)
        num_in_memory = match.hit
        snapshot = _useful_snapshot(request, match)
        if snapshot is not None:
            match = _without_checkpoint(match, snapshot, cache.block_size)
        elif cache.store.files is not None and request.block_hashes is not None:
            match = _restore_from_files(request, match, cache, spare_blocks, spare_window_blocks)
        start = match.hit if snapshot is None else snapshot.num_tokens
        remaining, is_cut = request.num_tokens - start, False
        if remaining > budget and not limits.enable_chunked_prefill:
            if remaining <= limits.max_num_batched_tokens or budget < whole_prompt_end(request, limits) - start:
                return None
            is_cut = True
        # All but the last token is cached: this is a decode row at once, with as many tokens as the others.
        if 0 < start == request.num_tokens - 1 and budget <= num_drafts:
            return None
        if self._media is not None and request.media:
            # Its row must be able to begin, and without chunked prefill to end.
            end = start + 1 if limits.enable_chunked_prefill or is_cut else request.num_tokens
            if self._media.max_chunk_end(request, start, end) < end:
                return None
        positions = plan_checkpoints(
            self._policy,
            cache.block_size,
            request.num_tokens,
            start,
            match.num_matched,
            cache.store.num_checkpoint_places,
            request.marks,
            request.client,
        )
        id, reads = request.request_id, snapshot is None
        if not cache.admit(id, request.num_tokens, match, spare_blocks, spare_window_blocks, uses_checkpoint=reads):
            self._refusal = _Refusal(request, *room)
            return None
        queues.start(request)
        self._refusal = None
        self._counters.cut_recomputations += is_cut
        request.num_computed_tokens, request.checkpoint_positions = start, positions
        self._take_imported(request, snapshot)
        self._report_hit(request, match, match.hit - num_in_memory, positions, has_snapshot=snapshot is not None)
        return request

    def _take_imported(self, request: Request, snapshot: KVSnapshot | None) -> None:
        """Import an admitted request's KV snapshot, unless it has a better hit, and forget what it brought."""
        start = request.num_computed_tokens
        if snapshot is not None:
            self._cache.import_kv(request.request_id, snapshot, request.block_hashes)
            self.moves.carried_tokens += start
            self.moves.carried_bytes += snapshot.num_bytes
        elif request.num_imported_tokens:
            self.moves.recomputed_tokens += max(0, request.num_imported_tokens - start)
        request.kv_snapshot, request.num_imported_tokens = None, 0

    def _report_hit(
        self, request: Request, match: Match, from_files: int, positions: CheckpointPositions, has_snapshot: bool
    ) -> None:
        """Report and count an admitted request's hit, and pin its marks within the hit."""
        cache = self._cache
        if request.cache_report is None:
            report = make_cache_report(request, match, positions, cache)
            request.cache_report = report = replace(report, from_files=from_files)
            self.prefix_counters.count(report.cached_tokens, report.misses, report.from_files)
        elif not has_snapshot:
            self.prefix_counters.restored_tokens += match.hit
        if request.marks:
            # Without a checkpoint of its own, a KV snapshot's hit is no place for one.
            path = () if has_snapshot else match.path
            positions.pinned |= pin_hit_marks(cache.store, path, request.marks, cache.block_size, request.client)
            request.update_cache_report()

    def reason_to_wait(self, budget: int) -> str:
        """Return why the first waiting request is not in a step that has room for `budget` more tokens."""
        if len(self._queues.running) >= self._limits.max_num_seqs:
            return f"max_num_seqs {self._limits.max_num_seqs} is reached"
        if budget <= 0:
            return f"the step has max_num_batched_tokens {self._limits.max_num_batched_tokens}"
        if self.is_head_blocked():
            return "too little cache memory is available"
        return "its prompt or its images do not fit into the rest of the step"

    def is_head_blocked(self) -> bool:
        """Return whether the first waiting request has found too little memory, and would find no more now."""
        refusal, queues = self._refusal, self._queues
        if refusal is None or not queues.waiting:
            return False
        return refusal.still_holds(queues.next_waiting(), *self._available(self.growing_requests())[2])

    def row_to_yield(self) -> Request | None:
        """Return a running request to preempt for the next waiting one, of a client below its share of the rows.

        None if there are rows and memory for all such clients, or if no other client is above its share. A request
        must wait.
        """
        queues, max_num_seqs = self._queues, self._limits.max_num_seqs
        num_rows = min(len(queues.running) + 1, max_num_seqs)
        below = queues.clients_below_share(num_rows)
        if not below:
            return None
        head = queues.next_waiting()
        is_out_of_rows = len(queues.running) + len(below) > max_num_seqs
        if head.client not in below or not (is_out_of_rows or self.is_head_blocked()):
            return None
        request = queues.newest_above_share(num_rows)
        return None if request is None or request.service_order[0] < head.service_order[0] else request

    def retry_head(self) -> None:
        """Forget the refusal after a prompt advanced, since the first waiting request may share its blocks."""
        self._refusal = None

    def growing_requests(self) -> list[Request]:
        """Return the running requests that may need more blocks."""
        return list(filter(self.may_need_blocks, self._queues.running))

    def may_need_blocks(self, request: Request) -> bool:
        """Return whether a running request has too few blocks for its greatest length."""
        return request.max_num_tokens - 1 > self._cache.request_cache(request.request_id).capacity

    def _available(self, growing: Collection[Request]) -> tuple[int, int, tuple[int, int, int]]:
        """Return (spare blocks, spare window blocks, available memory).

        Spare are those that must stay available, one for each of the `growing` requests, else it would soon
        preempt the admitted request. Available are (blocks beyond the spare ones, slots, window blocks beyond the spare
        ones).
        """
        cache, window_blocks = self._cache, self._cache.window_blocks
        spare_blocks, spare_window_blocks, num_window_blocks = len(growing), 0, 0
        if window_blocks is not None:
            spare_window_blocks = sum(
                window_blocks.may_grow(cache.request_cache(request.request_id)) for request in growing
            )
            num_window_blocks = window_blocks.num_unreserved - spare_window_blocks
        return (
            spare_blocks,
            spare_window_blocks,
            (cache.blocks.num_available - spare_blocks, cache.slots.num_available, num_window_blocks),
        )


def whole_prompt_end(request: Request, limits: SchedulerLimits) -> int:
    """Return the position before which no chunk may end: the end of a prompt that one step computes; else 0."""
    return len(request.prompt_token_ids) if limits.whole_prompts else 0


def match_prefix(request: Request, cache: CacheManager, policy: PrefixCachePolicy) -> Match:
    """Return the indexed part of the request's known tokens. The last of them is computed in any case.

    A request that is owed log-probabilities of its prompt takes no more than those already delivered. A request that
    computes all of its tokens takes nothing.
    """
    if not policy.prefix_caching:
        return Match()
    if request.block_hashes is None:
        root = None if cache.store.files is None else cache.store.files.root
        media = (whole_prompt_span(request.prompt_token_ids),) if policy.whole_prompts else request.media
        request.block_hashes = BlockHashes(cache.block_size, request.cache_salt, media, root=root)
    request.block_hashes.extend(request.tokens, request.num_tokens)
    return cache.store.match(request.block_hashes, _max_hit_tokens(request))


def _restore_from_files(
    request: Request, match: Match, cache: CacheManager, spare_blocks: int, spare_window_blocks: int
) -> Match:
    """Return the match after reading the files that pay, if there is room for the request then."""
    assert request.block_hashes is not None, "a request with a match has block hashes"
    if cache.window_blocks is not None and not cache.window_blocks.has_room(
        -(-request.num_tokens // cache.block_size), spare_window_blocks
    ):
        return match
    num_blocks = cache.blocks_needed(request.num_tokens) - len(match.matched) + spare_blocks
    num_slots = 1 + cache.state_slots.slots_per_request if cache.state_slots.slots_per_request else 0
    return restore_from_files(cache.store, request.block_hashes, _max_hit_tokens(request), match, num_blocks, num_slots)


def _max_hit_tokens(request: Request) -> int:
    """Return how many of the request's tokens may come from the cache."""
    limit = 0 if request.skips_prefix_cache else request.num_tokens - 1
    if request.wants_prompt_logprobs and num_prompt_logprobs_due(request, 0, limit) > 0:
        limit = min(limit, request.num_prompt_logprobs)
    return limit


def _useful_snapshot(request: Request, match: Match) -> KVSnapshot | None:
    """Return the KV snapshot that came with the request, unless the index has as many tokens of it."""
    snapshot = request.kv_snapshot
    return snapshot if snapshot is not None and snapshot.num_tokens > match.hit else None


def _without_checkpoint(match: Match, snapshot: KVSnapshot, block_size: int) -> Match:
    """Return a match of the indexed blocks that equal full blocks of the KV snapshot. They need no checkpoint."""
    path = match.matched[: snapshot.num_tokens // block_size]
    return Match(path, path)


def make_cache_report(
    request: Request, match: Match, positions: CheckpointPositions, cache: CacheManager
) -> CacheReport:
    """Return the report of the cache hit of a request that has not been admitted before."""
    num_tokens, marks = request.num_tokens, {mark.boundary(cache.block_size): False for mark in request.marks}
    if request.block_hashes is None or request.wants_prompt_logprobs or request.skips_prefix_cache:
        return CacheReport(match.hit, {MissCause.NOT_WANTED.value: num_tokens - match.hit}, marks=marks)
    misses = explain_misses(
        num_tokens,
        match.hit,
        match.matched,
        request.block_hashes,
        cache.store.evicted_keys,
        cache.store.damaged_keys,
        match.hit_without_window,
    )
    has_interior = positions.mode != "none" and positions.max_interior > 0
    nearest_mark = None
    if MissCause.NO_CHECKPOINT.value in misses and cache.store.pins.pinned:
        nearest_mark = next((entry.end for entry in reversed(match.matched) if entry.pin is not None), None)
    return CacheReport(
        match.hit, misses, positions.spacing if has_interior else None, marks=marks, nearest_mark=nearest_mark
    )


_MIN_SCORED = 16
"""Prompt tokens that a request may score in its first step, whatever else is scored there."""


class PrefillScheduler:
    """Maker of the rows of running requests that compute a prompt, or known outputs after a preemption."""

    def __init__(
        self, limits: SchedulerLimits, cache: CacheManager, queues: RequestQueues, media: EncoderScheduler | None
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._queues = queues
        self._media = media
        self._scores_left: int | None = None
        """Prompt tokens that the step may still score; None if no request decodes in it, which would wait."""

    def begin_step(self, is_decoding: bool) -> None:
        """Begin a step, in which other requests decode if `is_decoding`."""
        self._scores_left = self._limits.scored_tokens if is_decoding else None

    def next_row(
        self, request: Request, budget: int, num_drafts: int, spare_slots: int, is_new: bool = False
    ) -> BatchRow | None:
        """Return the next row of `request`, of at most `budget` tokens; None if it must wait.

        It waits for slots, image cells, or a step with room for scores, but for that last not if it `is_new`, admitted
        to this step. No checkpoint takes one of the last `spare_slots` slots.
        """
        if not self._cache.allocate_write_slots(request.request_id, spare_slots):
            return None
        assert request.checkpoint_positions is not None, "a running request knows where its checkpoints go"
        start = request.num_computed_tokens
        end = start + self._chunk_tokens(request, budget, num_drafts)
        if self._scores_left is not None and request.wants_prompt_logprobs:
            end = self._scored_end(request, start, end, is_new)
            if end == start:
                return None
        end = request.checkpoint_positions.chunk_end(start, end)
        media: tuple[MediaUse, ...] = ()
        if self._media is not None and request.media:
            reach = self._media.max_chunk_end(request, start, end)
            if self._limits.whole_images:
                reach = whole_images_end(request.media, start, reach)
            if reach == start:
                return None
            end = request.checkpoint_positions.chunk_end(start, reach)
            media = self._media.pin_images(request, start, end)
        if end < whole_prompt_end(request, self._limits):
            return None
        positions = request.checkpoint_positions.claim_inside(start, end) if end - start > 1 else []
        if positions:
            self._cache.reserve_checkpoints(request.request_id, positions, spare_slots)
        if self._cache.window_blocks is not None:
            self._cache.allocate_window_blocks(request.request_id, end)
        row = make_row(
            request, self._cache.request_cache(request.request_id), end - start, 0, media, self._limits.whole_prompts
        )
        if self._scores_left is not None:
            self._scores_left -= row.num_scored
        return row

    def _scored_end(self, request: Request, start: int, end: int, is_new: bool) -> int:
        """Return the end of a chunk, at most `end`, that scores no more prompt tokens than the step may.

        `start` if the step scores enough already. A request that `is_new` is not admitted without a row.
        """
        left = max(self._scores_left or 0, _MIN_SCORED if is_new else 0)
        if not self._limits.enable_chunked_prefill or num_prompt_logprobs_due(request, start, end) <= left:
            return end
        return max(start, request.num_prompt_logprobs) + left if left > 0 else start

    def _chunk_tokens(self, request: Request, budget: int, num_drafts: int) -> int:
        """Return how many prompt tokens a step with room for `budget` more tokens should take at most.

        The step has `num_drafts` drafts per decode row. A prompt that does not fit fills the step. It stops at a size
        that has a graph if no request waits longer for that: it needs no more steps of such a size than of the full
        one, and no other request has a prompt that could fill the step.
        """
        limits, start = self._limits, request.num_computed_tokens
        remaining = request.num_tokens - start
        is_whole = (limits.whole_images and len(request.media) > 0) or start < whole_prompt_end(request, limits)
        if not limits.graph_tokens or remaining <= budget or is_whole:
            return min(budget, remaining)
        room = budget - (limits.max_num_batched_tokens - limits.graph_tokens)
        num_later = self._tokens_of_others(request, num_drafts)
        if room <= 0 or num_later is None:
            return budget
        steps_later = -(-(remaining - budget) // limits.max_num_batched_tokens)
        return room if remaining - room <= steps_later * (limits.graph_tokens - num_later) else budget

    def _tokens_of_others(self, request: Request, num_drafts: int) -> int | None:
        """Return the tokens of each later step that others take if all decode; None if one has a prompt."""
        queues = self._queues
        if queues.waiting or not all(other is request or is_decoding(other) for other in queues.running):
            return None
        return (len(queues.running) - 1) * (1 + num_drafts)
