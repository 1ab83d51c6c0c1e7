"""The start of waiting requests: what each finds in the prefix index, whether there is memory for it, and what is told
of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.cache.chain import Chain
from ostinato.cache.manager import CacheManager
from ostinato.cache.placement import CachePolicy, Placement, place_checkpoints
from ostinato.cache.report import CacheReport, MissCause, explain
from ostinato.cache.store import Match
from ostinato.observe.counts import PrefixCounts, SchedulerCounts
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.media import MediaHolders
from ostinato.schedule.queues import Queues
from ostinato.schedule.request import Request, num_prompt_logprobs_owed


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The first in line found too little memory, though so many blocks and slots were there for it.

    Remembered, so that a long prompt that waits while others decode is not looked up in the index in each step.
    """

    request: Request
    num_blocks: int
    num_slots: int

    def stands(self, request: Request, num_blocks: int, num_slots: int) -> bool:
        """Whether the same request would find no more now. What prompts of others have computed meanwhile, which it
        may share, is for the caller to see to."""
        return self.request is request and num_blocks <= self.num_blocks and num_slots <= self.num_slots


class Admission:
    """Gives waiting requests, in order of rank, their memory, with what the prefix index has of them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        policy: CachePolicy,
        queues: Queues,
        media: MediaHolders | None,
        counters: SchedulerCounts,
    ) -> None:
        self.prefix_counters = PrefixCounts(misses=dict.fromkeys((cause.value for cause in MissCause), 0))
        self._limits = limits
        self._cache = cache
        self._policy = policy
        self._queues = queues
        self._media = media
        self._counters = counters
        self._refusal: _Refusal | None = None

    def start_next(self, budget: int, num_drafts: int) -> Request | None:
        """Lets the first that waits run, in a step with room for `budget` more tokens; None, and at most something idle
        was evicted for it, if nobody waits, or if it finds no row, too few tokens or no memory."""
        queues, cache, limits = self._queues, self._cache, self._limits
        if not queues.waiting or budget <= 0 or len(queues.running) >= limits.max_num_seqs:
            return None
        request = queues.waiting[0]
        spare_blocks, room = self._room()
        if self._refusal is not None and self._refusal.stands(request, *room):
            return None
        match = find_match(request, cache, self._policy)
        remaining, is_cut = request.num_tokens - match.hit, False
        if remaining > budget and not limits.enable_chunked_prefill:
            if remaining <= limits.max_num_batched_tokens:
                return None
            is_cut = True
        # All but the last token is cached: a decode row at once, with as many tokens as the others.
        if 0 < match.hit == request.num_tokens - 1 and budget <= num_drafts:
            return None
        if self._media is not None and request.media:
            # Its row must be able to begin, and without chunked prefill to end.
            end = match.hit + 1 if limits.enable_chunked_prefill or is_cut else request.num_tokens
            if self._media.reach(request, match.hit, end) < end:
                return None
        placement = place(request, match, cache, self._policy)
        if not cache.admit(request.request_id, request.num_tokens, match, spare_blocks):
            self._refusal = _Refusal(request, *room)
            return None
        queues.start()
        self._refusal = None
        self._counters.cut_recomputations += is_cut
        request.num_computed_tokens, request.placement = match.hit, placement
        if request.cache_report is None:
            request.cache_report = report(request, match, placement, cache)
            self.prefix_counters.count(request.cache_report.cached_tokens, request.cache_report.misses)
        else:
            self.prefix_counters.restored_tokens += match.hit
        return request

    def has_refused(self) -> bool:
        """Whether the first that waits has found too little memory, and would find no more now."""
        refusal, waiting = self._refusal, self._queues.waiting
        return refusal is not None and bool(waiting) and refusal.stands(waiting[0], *self._room()[1])

    def look_again(self) -> None:
        """A prompt advanced, which the first in line may share."""
        self._refusal = None

    def _room(self) -> tuple[int, tuple[int, int]]:
        """Blocks that must stay available, one for each running request that may need it, else it would soon preempt
        who is admitted; and the blocks beyond them and the slots that are there."""
        spare_blocks = sum(map(self._may_outgrow, self._queues.running))
        return spare_blocks, (self._cache.blocks.num_available - spare_blocks, self._cache.slots.num_available)

    def _may_outgrow(self, request: Request) -> bool:
        """Whether the blocks that a running request holds are too few for its greatest length."""
        return request.max_num_tokens - 1 > self._cache.holding(request.request_id).capacity


def find_match(request: Request, cache: CacheManager, policy: CachePolicy) -> Match:
    """What the index has of the request's known tokens. The last of them is computed in any case.

    A request that is owed log-probabilities of its prompt takes no more than those already delivered.
    """
    if not policy.prefix_caching:
        return Match()
    if request.chain is None:
        request.chain = Chain(cache.block_size, request.cache_salt, request.media)
    request.chain.extend(request.tokens, request.num_tokens)
    limit = request.num_tokens - 1
    if request.wants_prompt_logprobs and num_prompt_logprobs_owed(request, 0, limit) > 0:
        limit = min(limit, request.num_prompt_logprobs)
    return cache.store.match(request.chain, limit)


def place(request: Request, match: Match, cache: CacheManager, policy: CachePolicy) -> Placement:
    """Where the request's checkpoints go, if it is admitted with this match."""
    evictable = cache.slots.num_available
    return place_checkpoints(policy, cache.block_size, request.num_tokens, match.hit, match.num_matched, evictable)


def report(request: Request, match: Match, placement: Placement, cache: CacheManager) -> CacheReport:
    """What the cache gave to a request that has not been admitted before."""
    num_tokens = request.num_tokens
    if request.chain is None or request.wants_prompt_logprobs:
        return CacheReport(match.hit, {MissCause.NOT_WANTED.value: num_tokens - match.hit})
    misses = explain(num_tokens, match.hit, match.matched, request.chain, cache.store.evicted_keys)
    has_interior = placement.mode != "none" and placement.share > 0
    return CacheReport(match.hit, misses, placement.spacing if has_interior else None)


def restate_spacing(request: Request) -> None:
    """Let the report follow a placement whose spacing has doubled since, as a long output makes it."""
    told, placement = request.cache_report, request.placement
    if told is None or placement is None or told.checkpoint_spacing is None:
        return
    if placement.spacing > told.checkpoint_spacing:
        request.cache_report = replace(told, checkpoint_spacing=placement.spacing)
