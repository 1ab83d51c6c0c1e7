"""Export of a request's KV to another engine."""

from __future__ import annotations

from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.request_cache import KVSnapshot
from ostinato.scheduler.request import Request, RequestStatus

CopiedBlocks = dict[tuple[str, int, int], memoryview]
"""Copies that were made: ("block" or "window_block", its id, its computed tokens) -> contents."""


def export_kv(request: Request, cache: CacheManager, copies: CopiedBlocks) -> KVSnapshot | None:
    """Return a KV snapshot of a request between two steps; None if there is nothing that could be used.

    A request that waits since it was imported returns the snapshot that came with it.

    A block or window block that is in `copies`, because several requests share it, is not copied again. Of one that is
    not full, only computed tokens are copied: the rest belongs to a draft or another request. The sum of mean pooling
    (`skips_prefix_cache`) is in none of these: its tokens are computed again, as after a preemption.
    """
    memory, num_tokens, size = cache.memory, request.num_computed_tokens, cache.block_size
    if request.status is not RequestStatus.RUNNING:
        return request.kv_snapshot
    if memory is None or num_tokens == 0 or request.skips_prefix_cache:
        return None
    request_cache = cache.request_cache(request.request_id)

    def copied(kind: str, table: tuple[int, ...], first: int) -> tuple[memoryview, ...]:
        """Return copies of the computed tokens, from block `first` of the request on."""
        read, blocks = memory.read_window_block if kind == "window_block" else memory.read_block, []
        for index, id in enumerate(table[first : -(-num_tokens // size)], start=first):
            count = min(size, num_tokens - index * size)
            if (kind, id, count) not in copies:
                copies[kind, id, count] = read(id, None if count == size else count)
            blocks.append(copies[kind, id, count])
        return tuple(blocks)

    blocks, window_blocks = (
        copied("block", request_cache.block_table, 0),
        copied("window_block", request_cache.window_block_table, request_cache.first_window_block),
    )
    if not cache.state_slots.slots_per_request:
        return KVSnapshot(num_tokens, blocks, window_blocks, None)
    assert request_cache.read_slot, "a request with computed tokens has a state"
    return KVSnapshot(num_tokens, blocks, window_blocks, memory.read_slot(request_cache.read_slot))
