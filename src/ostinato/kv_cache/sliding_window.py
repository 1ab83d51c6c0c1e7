"""Window blocks: rules for how many requests and prefixes need, and those that requests have or are promised.

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
        """Window blocks beyond `own` that the batch rows of a step need together.

        With t tokens, a batch row needs (t - 1) // B more.
        """
        return (self.step_tokens - 1) // self.block_size

    def first_block(self, position: int) -> int:
        """Return the first window block that the tokens from `position` on need, as the number of its block."""
        return max(0, position // self.block_size - self.blocks_per_window)

    def blocks_needed(self, num_blocks: int, num_requests: int = 1) -> int:
        """Return the window blocks that let `num_requests` requests of `num_blocks` blocks each always continue."""
        own = min(num_blocks, self.blocks_per_request)
        return num_requests * own + min(self.shared_blocks, num_requests * (num_blocks - own))


class WindowBlocks:
    """Window blocks of running requests.

    A request with blocks for its tokens is promised `rules.own` window blocks, or as many as it has blocks. All
    requests that have more blocks are promised `rules.shared` more in common, for the batch rows of a step.
    """

    def __init__(self, rules: SlidingWindowSpec, store: CacheStore) -> None:
        self.rules, self._store = rules, store
        self._own = 0
        self._beyond = 0
        """Blocks of requests beyond the window blocks that are promised to each."""

    @property
    def num_unreserved(self) -> int:
        """Window blocks that can still be promised."""
        return self._store.window_blocks.capacity - self._own - min(self.rules.shared_blocks, self._beyond)

    @property
    def max_blocks(self) -> int | None:
        """Most blocks of a request that is alone; None if there is no bound."""
        capacity = self._store.window_blocks.capacity
        return None if capacity >= self.rules.blocks_per_request + self.rules.shared_blocks else capacity

    def may_grow(self, holding: RequestCache) -> bool:
        """Return whether another block for the request would need another window block."""
        return holding.num_reserved_blocks < self.rules.blocks_per_request or self._beyond < self.rules.shared_blocks

    def reserve(self, holding: RequestCache, num_blocks: int, spare: int = 0) -> bool:
        """Promise the request the window blocks that `num_blocks` blocks need, in place of those promised so far.

        Return False, and change nothing, if more are needed than can be promised with `spare` left.
        """
        own, beyond = self._own, self._beyond
        before = self.num_unreserved
        self._own += min(num_blocks, self.rules.blocks_per_request) - min(
            holding.num_reserved_blocks, self.rules.blocks_per_request
        )
        self._beyond += max(num_blocks - self.rules.blocks_per_request, 0) - max(
            holding.num_reserved_blocks - self.rules.blocks_per_request, 0
        )
        if self.num_unreserved < before and self.num_unreserved < spare:
            self._own, self._beyond = own, beyond
            return False
        holding.num_reserved_blocks = num_blocks
        return True

    def has_room(self, num_blocks: int, spare: int = 0) -> bool:
        """Return whether a new request of `num_blocks` blocks could be promised its window blocks with `spare` left."""
        holding = RequestCache()
        return self.reserve(holding, num_blocks, spare) and self.reserve(holding, 0)

    def max_growth(self, holding: RequestCache) -> int | None:
        """Return the blocks by which a request can grow; None if there is no bound."""
        needed = max(self.rules.blocks_per_request - holding.num_reserved_blocks, 0) + max(
            self.rules.shared_blocks - self._beyond, 0
        )
        return None if self.num_unreserved >= needed else self.num_unreserved

    def attach(self, holding: RequestCache, path: Sequence[IndexEntry]) -> None:
        """Add references to the window blocks of a hit's window."""
        first = max(0, len(path) - self.rules.blocks_per_window)
        found = [entry.window_block for entry in path[first:]]
        ids = tuple(window_block.id for window_block in found if window_block is not None)
        assert len(ids) == len(found), "a hit has all window blocks of its window"
        self._store.window_blocks.retain(ids)
        holding.window_block_table, holding.first_window_block = (0,) * first + ids, first

    def allocate_imported(self, holding: RequestCache, indexed: Sequence[IndexEntry], num_tokens: int) -> list[int]:
        """Allocate the window blocks of a request whose first `num_tokens` tokens were computed elsewhere.

        Its entries are `indexed`; where they have a window block, that one is used. Returns the numbers of the blocks
        whose window blocks are to be written.
        """
        first, end = self.rules.first_block(num_tokens), -(-num_tokens // self.rules.block_size)
        kept = {
            number: each.window_block.id
            for number, each in enumerate(indexed)
            if number >= first and each.window_block is not None
        }
        # They are referenced before anything is allocated, so that they are not evicted for the others.
        self._store.window_blocks.retain(kept.values())
        lacking = [number for number in range(first, end) if number not in kept]
        taken = dict(zip(lacking, self._store.allocate_window_blocks(len(lacking)), strict=True))
        for number, id in taken.items():
            if number < len(indexed):
                self._store.add_window_block(indexed[number], id)
        ids = kept | taken
        holding.window_block_table = (0,) * first + tuple(ids[number] for number in range(first, end))
        holding.first_window_block = first
        return lacking

    def allocate(self, holding: RequestCache, end: int) -> None:
        """Allocate the window blocks that tokens before position `end` are written to."""
        missing = -(-end // self.rules.block_size) - len(holding.window_block_table)
        if missing > 0:
            holding.window_block_table += tuple(self._store.allocate_window_blocks(missing))

    def free_outside_window(self, holding: RequestCache, position: int) -> None:
        """Free the window blocks that no token from `position` on sees, which is the first that is not computed.

        Also free those after that token's block, which rejected drafts had used.
        """
        first = min(self.rules.first_block(position), len(holding.window_block_table))
        end = position // self.rules.block_size + 1
        if first == holding.first_window_block and end >= len(holding.window_block_table):
            return
        self._store.release_window_blocks(
            holding.window_block_table[holding.first_window_block : first] + holding.window_block_table[end:]
        )
        holding.window_block_table = (0,) * first + holding.window_block_table[first:end]
        holding.first_window_block = first

    def free(self, holding: RequestCache) -> None:
        """Free all window blocks of the request."""
        self._store.release_window_blocks(holding.window_block_table[holding.first_window_block :])
        holding.window_block_table, holding.first_window_block = (), 0
        self.reserve(holding, 0)

    def check_integrity(self, holdings: Sequence[RequestCache]) -> None:
        """Raise AssertionError unless what is promised is what was counted, and enough for what is held."""
        own = self.rules.blocks_per_request
        assert self._own == sum(min(each.num_reserved_blocks, own) for each in holdings), (
            "promised window blocks were miscounted"
        )
        beyond = sum(max(each.num_reserved_blocks - own, 0) for each in holdings)
        assert self._beyond == beyond, "blocks beyond promised window blocks were miscounted"
        assert self.num_unreserved >= 0, "more window blocks are promised than there are"
        for each in holdings:
            assert len(each.window_block_table) <= each.num_reserved_blocks, (
                "a request has window blocks that it was not promised"
            )
