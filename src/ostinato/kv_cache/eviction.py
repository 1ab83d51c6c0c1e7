"""Eviction from the prefix index: the order in which entries go when their memory is needed.

Policy `marconi` follows Pan et al. 2024 (arXiv 2411.19379, section 4.2): the utility of something cached is its recency
plus the FLOPs that it saves per byte of its memory, each scaled to 0..1 over all candidates, and the least useful goes
first. Policy `lru` looks at recency alone. Under both, entries that can save nothing, or never have, go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Generic, Literal, TypeVar

from ostinato.kv_cache.prefix_index import Checkpoint, IndexEntry, PrefixIndex, WindowBlock

EvictionPolicy = Literal["marconi", "lru"]

PINNED_TIER = 2
"""Tier of what a pinned prefix needs."""

EFFICIENCY_WEIGHT = 1.0
"""Weight of the FLOPs saved per byte relative to recency; 0 would be LRU."""

RANKED_FRACTION = 8
"""Candidates per candidate that is ranked beforehand, so that one look at all of them serves several evictions."""

T = TypeVar("T", IndexEntry, Checkpoint, WindowBlock)


@dataclass(frozen=True, slots=True)
class EvictionCosts:
    """Costs of computing a prefix again and of keeping it.

    The first t tokens of a prefix cost `flops_per_token * t + flops_per_pair * t * (t + 1) / 2`. Sizes are in bytes,
    and 0 for memory that the model does not have.
    """

    flops_per_token: float = 1.0
    flops_per_pair: float = 0.0
    block_bytes: int = 1
    slot_bytes: int = 1
    window_block_bytes: int = 0

    def flops(self, start: int, end: int) -> float:
        """Return the FLOPs of the tokens `start` to `end - 1` if those before them are cached."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return self.flops_per_token * (end - start) + self.flops_per_pair * pairs


@dataclass(frozen=True, slots=True)
class Utility:
    """Reasons for something to stay. A lower `tier` goes before any higher; `efficiency` is in FLOPs per byte."""

    tier: int
    last_use: int
    efficiency: float


def leaf_utility(
    entry: IndexEntry, costs: EvictionCosts, has_state: bool, index: PrefixIndex, has_window_blocks: bool = False
) -> Utility:
    """Return the worth of a block that no indexed prefix extends.

    With state layers, only a checkpoint gives it worth; with windows, only a window block, which goes with it.
    """
    if has_window_blocks and entry.window_block is None:
        return Utility(tier=0, last_use=entry.last_use, efficiency=0.0)
    if not has_state:
        size = entry.end - (0 if entry.parent is None else entry.parent.end)
        num_bytes = costs.block_bytes + costs.window_block_bytes
        tier = 1 if entry.pin is None else PINNED_TIER
        return Utility(tier, entry.last_use, costs.flops(entry.end - size, entry.end) / max(num_bytes, 1))
    checkpoint = entry.checkpoint
    if checkpoint is None:
        return Utility(0, entry.last_use, 0.0)
    saved = costs.flops(index.previous_checkpoint_end(checkpoint), entry.end)
    last_use = max(entry.last_use, checkpoint.last_use)
    return Utility(
        utility_tier(checkpoint),
        last_use,
        saved / max(costs.block_bytes + costs.window_block_bytes + costs.slot_bytes, 1),
    )


def checkpoint_utility(checkpoint: Checkpoint, costs: EvictionCosts, index: PrefixIndex) -> Utility:
    """Return the worth of the state alone, if its block stays: the tokens since the checkpoint before it."""
    saved = costs.flops(index.previous_checkpoint_end(checkpoint), checkpoint.entry.end)
    return Utility(utility_tier(checkpoint), checkpoint.last_use, saved / max(costs.slot_bytes, 1))


def window_block_utility(window_block: WindowBlock, costs: EvictionCosts, num_together: int) -> Utility:
    """Return the worth of a window block.

    A prefix is reusable only with all `num_together` blocks of its window, which jointly save the tokens before.
    """
    saved = costs.flops(0, window_block.entry.end)
    return Utility(
        utility_tier(window_block), window_block.last_use, saved / max(costs.window_block_bytes * num_together, 1)
    )


def utility_tier(item: Checkpoint | WindowBlock) -> int:
    """Return PINNED_TIER for what a pinned prefix needs, 0 for what no request has hit inside a prefix, else 1.

    Tier 0 can save nothing as far as is known.
    """
    if item.entry.num_windows_pinned if isinstance(item, WindowBlock) else item.entry.pin is not None:
        return PINNED_TIER
    return 0 if item.is_interior and item.hits == 0 else 1


class EvictionQueue(Generic[T]):
    """Candidates in the order of their eviction.

    A look at all of them costs O(candidates), so the first few are remembered. One that was used since, or is no
    candidate any more, is skipped. One that became a candidate since waits for the next look, unless `push` adds it.
    Something pinned goes only right after a look, so that it outlives what waits.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        candidates: Callable[[], Iterable[T]],
        worth: Callable[[T], Utility],
        is_candidate: Callable[[T], bool],
    ) -> None:
        self._policy = policy
        self._candidates: Callable[[], Iterable[T]] = candidates
        self._worth: Callable[[T], Utility] = worth
        self._is_candidate: Callable[[T], bool] = is_candidate
        self._heap: list[tuple[tuple[int, float, int], int, int, T]] = []
        self._sequence = count()
        self._score: Callable[[Utility], tuple[int, float, int]] = _by_recency
        self._highest: tuple[int, float, int] = (0, 0.0, 0)

    def pop(self) -> T | None:
        """Return the next candidate to evict, or None if there is none."""
        for has_ranked in (False, True):
            while self._heap and (has_ranked or self._heap[0][0][0] < PINNED_TIER):
                score, _, last_use, item = heapq.heappop(self._heap)
                if self._is_candidate(item):
                    worth = self._worth(item)
                    if worth.last_use == last_use and worth.tier == score[0]:
                        return item
            if not has_ranked:
                self._rank_all()
        return None

    def push(self, item: T) -> None:
        """Let a new candidate take part before the next look at all."""
        worth = self._worth(item)
        score = self._score(worth)
        if self._heap and score <= self._highest:
            heapq.heappush(self._heap, (score, next(self._sequence), worth.last_use, item))

    def _rank_all(self) -> None:
        candidates = [(item, self._worth(item)) for item in self._candidates()]
        if not candidates:
            return
        self._score = _by_recency if self._policy == "lru" else _by_utility([worth for _, worth in candidates])
        scored = [(self._score(worth), next(self._sequence), worth.last_use, item) for item, worth in candidates]
        self._heap = heapq.nsmallest(max(1, len(scored) // RANKED_FRACTION), scored)
        self._highest = self._heap[-1][0]


def _by_recency(worth: Utility) -> tuple[int, float, int]:
    return worth.tier, 0.0, worth.last_use


def _by_utility(worths: list[Utility]) -> Callable[[Utility], tuple[int, float, int]]:
    """Return a score: recency plus efficiency, each scaled to 0..1 over the candidates that the sum decides about."""
    judged = [worth for worth in worths if worth.tier == 1] or worths
    oldest, min_efficiency = min(w.last_use for w in judged), min(w.efficiency for w in judged)
    age = max(max(w.last_use for w in judged) - oldest, 1)
    spread = max(w.efficiency for w in judged) - min_efficiency

    def score(worth: Utility) -> tuple[int, float, int]:
        if worth.tier == 0:
            return _by_recency(worth)
        efficiency = (worth.efficiency - min_efficiency) / spread if spread > 0 else 0.0
        return worth.tier, (worth.last_use - oldest) / age + EFFICIENCY_WEIGHT * efficiency, worth.last_use

    return score
