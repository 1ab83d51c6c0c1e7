"""What of a request can be carried to another engine."""

from __future__ import annotations

from ostinato.cache.manager import CacheManager
from ostinato.cache.memory import Carried
from ostinato.schedule.request import Request, RequestStatus

Copies = dict[tuple[int, int], memoryview]
"""Copies that were made: (block, its computed tokens) -> contents."""


def carry(request: Request, cache: CacheManager, copies: Copies) -> Carried | None:
    """A copy of what was computed of a request, between two steps; what came with it if it has waited since; None if
    there is nothing, or nothing that could be used.

    A block that is in `copies`, since several requests have it, is not copied again. Of one that is not full, only
    computed tokens are: what stands behind them is a draft's, or another request's. The sum of a mean (`computes_all`)
    is in neither blocks nor state: its tokens are computed again, as after a preemption.
    """
    memory, num_tokens, size = cache.memory, request.num_computed_tokens, cache.block_size
    if request.status is not RequestStatus.RUNNING:
        return request.carried
    if memory is None or num_tokens == 0 or request.computes_all:
        return None
    holding = cache.holding(request.request_id)
    blocks = []
    for index, block in enumerate(holding.block_table[: cache.blocks_needed(num_tokens)]):
        count = min(size, num_tokens - index * size)
        if (block, count) not in copies:
            copies[block, count] = memory.read_block(block, None if count == size else count)
        blocks.append(copies[block, count])
    if not cache.states.per_request:
        return Carried(num_tokens, tuple(blocks), None)
    assert holding.read_slot, "who has computed tokens has a state"
    return Carried(num_tokens, tuple(blocks), memory.read_slot(holding.read_slot))
