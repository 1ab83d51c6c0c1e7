"""Window blocks: rules for how many requests and prefixes need, and those that requests have or have reserved.

A window block is to layers with a sliding window what a block is to the others: it holds `block_size` tokens of them,
and a request frees it when no token to come sees any of it.

A request allocates a window block when a batch row is made that writes to it. That one is available then was ensured
earlier, when the request got memory for its tokens: so no request is preempted in the middle of a prompt.

With B tokens in a block, the first of the tokens that follow `position` may be any of its block: so a request keeps the
last ceil((window - 1) / B) window blocks before that block, which a request that starts at the block's first token
needs as well. A step of t tokens adds at most ceil(t / B) + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.kv_cache.prefix_index import IndexEntry
from ostinato.kv_cache.request_cache import RequestCache
from ostinato.kv_cache.store import CacheStore


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Sizes that the number of window blocks depends on.

    `window`: positions that a token sees, itself the last, in the layer that sees most of those with a window.
    `step_tokens`: most tokens of a step, of all its batch rows together.
    """

    window: int
    block_size: int
    step_tokens: int

    @property
    def blocks_per_window(self) -> int:
        """Window blocks before a block boundary that a request needs to continue from there."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def blocks_per_request(self) -> int:
        """Window blocks of a request with a step of up to a block's tokens.

        They are its window's, and two that the tokens are in, or the one that they are in and that of the step after
        it.
        """
        return self.blocks_per_window + 2

    @property
    def shared_blocks(self) -> int:
        """Window blocks beyond those of the requests that the batch rows of a step need together.

        With t tokens, a batch row needs (t - 1) // B more.
        """
        return (self.step_tokens - 1) // self.block_size

    def first_block(self, position: int) -> int:
        """Return the first window block that the tokens from `position` on need, as the number of its block."""
        return max(0, position // self.block_size - self.blocks_per_window)

    def blocks_needed(self, num_blocks: int, num_requests: int = 1) -> int:
        """Return the window blocks that let `num_requests` requests of `num_blocks` blocks each always continue."""
        unshared = min(num_blocks, self.blocks_per_request)
        return num_requests * unshared + min(self.shared_blocks, num_requests * (num_blocks - unshared))


class WindowBlocks:
    """Window blocks of running requests.

    For a request with blocks for its tokens, `rules.blocks_per_request` window blocks are reserved, or as many as it
    has blocks. For all requests with more blocks, `rules.shared_blocks` more are reserved in common, for the batch rows
    of a step.
    """

    def __init__(self, rules: SlidingWindowSpec, store: CacheStore) -> None:
        self.rules, self._store = rules, store
        self._reserved = 0
        self._beyond = 0
        """Blocks of requests beyond the window blocks that are reserved for each."""

    @property
    def num_unreserved(self) -> int:
        """Window blocks that can still be reserved."""
        return self._store.window_blocks.capacity - self._reserved - min(self.rules.shared_blocks, self._beyond)

    @property
    def max_blocks(self) -> int | None:
        """Most blocks of a request that is alone; None if there is no bound."""
        capacity = self._store.window_blocks.capacity
        return None if capacity >= self.rules.blocks_per_request + self.rules.shared_blocks else capacity

    def may_grow(self, request_cache: RequestCache) -> bool:
        """Return whether another block for the request would need another window block."""
        return (
            request_cache.num_reserved_blocks < self.rules.blocks_per_request or self._beyond < self.rules.shared_blocks
        )

    def reserve(self, request_cache: RequestCache, num_blocks: int, spare: int = 0) -> bool:
        """Reserve the window blocks that `num_blocks` blocks need, in place of those reserved so far.

        Return False, and change nothing, if more are needed than can be reserved with `spare` left.
        """
        reserved, beyond = self._reserved, self._beyond
        previous = self.num_unreserved
        self._reserved += min(num_blocks, self.rules.blocks_per_request) - min(
            request_cache.num_reserved_blocks, self.rules.blocks_per_request
        )
        self._beyond += max(num_blocks - self.rules.blocks_per_request, 0) - max(
            request_cache.num_reserved_blocks - self.rules.blocks_per_request, 0
        )
        if self.num_unreserved < previous and self.num_unreserved < spare:
            self._reserved, self._beyond = reserved, beyond
            return False
        request_cache.num_reserved_blocks = num_blocks
        return True

    def has_room(self, num_blocks: int, spare: int = 0) -> bool:
        """Return whether window blocks could be reserved for a new request of `num_blocks` blocks with `spare` left."""
        request_cache = RequestCache()
        return self.reserve(request_cache, num_blocks, spare) and self.reserve(request_cache, 0)

    def max_growth(self, request_cache: RequestCache) -> int | None:
        """Return the blocks by which a request can grow; None if there is no bound."""
        needed = max(self.rules.blocks_per_request - request_cache.num_reserved_blocks, 0) + max(
            self.rules.shared_blocks - self._beyond, 0
        )
        return None if self.num_unreserved >= needed else self.num_unreserved

    def attach(self, request_cache: RequestCache, path: Sequence[IndexEntry]) -> None:
        """Add references to the window blocks of a hit's window."""
        first = max(0, len(path) - self.rules.blocks_per_window)
        window_blocks = [entry.window_block for entry in path[first:]]
        ids = tuple(window_block.id for window_block in window_blocks if window_block is not None)
        assert len(ids) == len(window_blocks), "a hit has all window blocks of its window"
        self._store.window_blocks.retain(ids)
        request_cache.window_block_table, request_cache.first_window_block = (0,) * first + ids, first

    def allocate_imported(
        self, request_cache: RequestCache, indexed: Sequence[IndexEntry], num_tokens: int
    ) -> list[int]:
        """Allocate the window blocks of a request whose first `num_tokens` tokens were computed elsewhere.

        Its entries are `indexed`; where they have a window block, that one is used. Returns the numbers of the blocks
        whose window blocks are to be written.
        """
        first, end = self.rules.first_block(num_tokens), -(-num_tokens // self.rules.block_size)
        shared_ids = {
            index: entry.window_block.id
            for index, entry in enumerate(indexed)
            if index >= first and entry.window_block is not None
        }
        # They are referenced before anything is allocated, so that they are not evicted for the others.
        self._store.window_blocks.retain(shared_ids.values())
        lacking = [index for index in range(first, end) if index not in shared_ids]
        allocated_ids = dict(zip(lacking, self._store.allocate_window_blocks(len(lacking)), strict=True))
        for index, id in allocated_ids.items():
            if index < len(indexed):
                self._store.add_window_block(indexed[index], id)
        ids = shared_ids | allocated_ids
        request_cache.window_block_table = (0,) * first + tuple(ids[index] for index in range(first, end))
        request_cache.first_window_block = first
        return lacking

    def allocate(self, request_cache: RequestCache, end: int) -> None:
        """Allocate the window blocks that tokens before position `end` are written to."""
        missing = -(-end // self.rules.block_size) - len(request_cache.window_block_table)
        if missing > 0:
            request_cache.window_block_table += tuple(self._store.allocate_window_blocks(missing))

    def free_outside_window(self, request_cache: RequestCache, position: int) -> None:
        """Free the window blocks that no token from `position` on sees, which is the first that is not computed.

        Also free those after that token's block, which rejected drafts had used.
        """
        first = min(self.rules.first_block(position), len(request_cache.window_block_table))
        end = position // self.rules.block_size + 1
        if first == request_cache.first_window_block and end >= len(request_cache.window_block_table):
            return
        self._store.release_window_blocks(
            request_cache.window_block_table[request_cache.first_window_block : first]
            + request_cache.window_block_table[end:]
        )
        request_cache.window_block_table = (0,) * first + request_cache.window_block_table[first:end]
        request_cache.first_window_block = first

    def free(self, request_cache: RequestCache) -> None:
        """Free all window blocks of the request."""
        self._store.release_window_blocks(request_cache.window_block_table[request_cache.first_window_block :])
        request_cache.window_block_table, request_cache.first_window_block = (), 0
        self.reserve(request_cache, 0)

    def check_integrity(self, request_caches: Sequence[RequestCache]) -> None:
        """Raise AssertionError unless what is reserved is what was counted, and enough for what is held."""
        max_reserved = self.rules.blocks_per_request
        assert self._reserved == sum(
            min(request_cache.num_reserved_blocks, max_reserved) for request_cache in request_caches
        ), "reserved window blocks were miscounted"
        beyond = sum(max(request_cache.num_reserved_blocks - max_reserved, 0) for request_cache in request_caches)
        assert self._beyond == beyond, "blocks beyond reserved window blocks were miscounted"
        assert self.num_unreserved >= 0, "more window blocks are reserved than there are"
        for request_cache in request_caches:
            assert len(request_cache.window_block_table) <= request_cache.num_reserved_blocks, (
                "a request has window blocks that were not reserved for it"
            )
