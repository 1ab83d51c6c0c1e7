"""How much of a prompt a step should take, and how many drafts a row has room for."""

from __future__ import annotations

from ostinato.cache.manager import CacheManager
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.queues import Queues
from ostinato.schedule.request import Request, is_decoding


def chunk_tokens(request: Request, budget: int, num_drafts: int, limits: SchedulerLimits, queues: Queues) -> int:
    """How many of a prompt's tokens a step with room for `budget` more, and drafts as given, should take at most.

    A prompt that does not fit fills the step up. It stops at a size that has a graph if that makes nobody wait: it
    needs no more steps of such a size than of the full one, and nobody else has a prompt to be computed, who would
    fill the step up himself.
    """
    remaining = request.num_tokens - request.num_computed_tokens
    if not limits.graph_tokens or remaining <= budget:
        return min(budget, remaining)
    room = budget - (limits.max_num_batched_tokens - limits.graph_tokens)
    num_later = _tokens_of_others(request, num_drafts, queues)
    if room <= 0 or num_later is None:
        return budget
    steps_later = -(-(remaining - budget) // limits.max_num_batched_tokens)
    return room if remaining - room <= steps_later * (limits.graph_tokens - num_later) else budget


def room_for_drafts(request: Request, cache: CacheManager, num_drafts: int) -> int:
    """How many of `num_drafts` drafts a decoding request can have: none that its length would cut off anyway, and no
    more than there are write slots for, which it has, and blocks, which it is given. Nobody is preempted for a draft.
    """
    count = min(num_drafts, request.max_num_tokens - request.num_tokens - 1)
    holding = cache.holding(request.request_id)
    if holding.slots:
        count = min(count, len(holding.slots) - 1)
    most = holding.capacity + cache.blocks.num_available * cache.block_size
    count = min(count, most - request.num_tokens)
    has_grown = cache.grow(request.request_id, request.num_tokens + count)
    assert has_grown, "available blocks were counted above"
    return count


def _tokens_of_others(request: Request, num_drafts: int, queues: Queues) -> int | None:
    """Tokens that others than `request` take of each later step, if all of them decode; None if one has a prompt."""
    if queues.waiting or not all(other is request or is_decoding(other) for other in queues.running):
        return None
    return (len(queues.running) - 1) * (1 + num_drafts)
