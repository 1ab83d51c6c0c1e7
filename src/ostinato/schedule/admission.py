"""What a waiting request finds in the prefix index, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.cache.chain import Chain
from ostinato.cache.manager import CacheManager
from ostinato.cache.placement import CachePolicy, Placement, place_checkpoints
from ostinato.cache.report import CacheReport, MissCause, explain
from ostinato.cache.store import Match
from ostinato.schedule.request import Request, num_prompt_logprobs_owed


@dataclass(frozen=True, slots=True)
class Refusal:
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
    if num_prompt_logprobs_owed(request, 0, limit) > 0:
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
