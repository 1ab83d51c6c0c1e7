"""Window blocks of the requests (see `pane_rules.py`), and those that are promised to them.

A request allocates a window block when a batch row is made that writes to it. That one is available then was ensured
earlier, when the request got memory for its tokens: so no request is preempted in the middle of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cache.holding import Holding
from ostinato.cache.index import Entry
from ostinato.cache.pane_rules import PaneRules
from ostinato.cache.store import CacheStore


class Panes:
    """Window blocks of running requests.

    A request with blocks for its tokens is promised `rules.own` window blocks, or as many as it has blocks. All
    requests that have more blocks are promised `rules.shared` more in common, for the batch rows of a step.
    """

    def __init__(self, rules: PaneRules, store: CacheStore) -> None:
        self.rules, self._store = rules, store
        self._own = 0
        self._beyond = 0
        """Blocks of requests beyond the window blocks that are promised to each."""

    @property
    def num_left(self) -> int:
        """Window blocks that can still be promised."""
        return self._store.panes.capacity - self._own - min(self.rules.shared, self._beyond)

    @property
    def most_blocks(self) -> int | None:
        """Most blocks of a request that is alone; None if there is no bound."""
        capacity = self._store.panes.capacity
        return None if capacity >= self.rules.own + self.rules.shared else capacity

    def may_need_more(self, holding: Holding) -> bool:
        """Return whether another block for the request would need another window block."""
        return holding.num_promised < self.rules.own or self._beyond < self.rules.shared

    def promise(self, holding: Holding, num_blocks: int, spare: int = 0) -> bool:
        """Promise the request the window blocks that `num_blocks` blocks need, in place of those promised so far.

        Return False, and change nothing, if more are needed than can be promised with `spare` left.
        """
        own, beyond = self._own, self._beyond
        before = self.num_left
        self._own += min(num_blocks, self.rules.own) - min(holding.num_promised, self.rules.own)
        self._beyond += max(num_blocks - self.rules.own, 0) - max(holding.num_promised - self.rules.own, 0)
        if self.num_left < before and self.num_left < spare:
            self._own, self._beyond = own, beyond
            return False
        holding.num_promised = num_blocks
        return True

    def has_room(self, num_blocks: int, spare: int = 0) -> bool:
        """Return whether a new request of `num_blocks` blocks could be promised its window blocks with `spare` left."""
        holding = Holding()
        return self.promise(holding, num_blocks, spare) and self.promise(holding, 0)

    def most_more(self, holding: Holding) -> int | None:
        """Return the blocks by which a request can grow; None if there is no bound."""
        needed = max(self.rules.own - holding.num_promised, 0) + max(self.rules.shared - self._beyond, 0)
        return None if self.num_left >= needed else self.num_left

    def attach(self, holding: Holding, path: Sequence[Entry]) -> None:
        """Add references to the window blocks of a hit's window."""
        first = max(0, len(path) - self.rules.of_window)
        found = [entry.pane for entry in path[first:]]
        ids = tuple(pane.id for pane in found if pane is not None)
        assert len(ids) == len(found), "a hit has all panes of its window"
        self._store.panes.retain(ids)
        holding.pane_table, holding.first_pane = (0,) * first + ids, first

    def take_in(self, holding: Holding, indexed: Sequence[Entry], num_tokens: int) -> list[int]:
        """Allocate the window blocks of a request whose first `num_tokens` tokens were computed elsewhere.

        Its entries are `indexed`; where they have a window block, that one is used. Returns the numbers of the blocks
        whose window blocks are to be written.
        """
        first, end = self.rules.first(num_tokens), -(-num_tokens // self.rules.block_size)
        kept = {
            number: each.pane.id for number, each in enumerate(indexed) if number >= first and each.pane is not None
        }
        # They are referenced before anything is allocated, so that they are not evicted for the others.
        self._store.panes.retain(kept.values())
        lacking = [number for number in range(first, end) if number not in kept]
        taken = dict(zip(lacking, self._store.take_panes(len(lacking)), strict=True))
        for number, id in taken.items():
            if number < len(indexed):
                self._store.keep_pane(indexed[number], id)
        ids = kept | taken
        holding.pane_table = (0,) * first + tuple(ids[number] for number in range(first, end))
        holding.first_pane = first
        return lacking

    def cover(self, holding: Holding, end: int) -> None:
        """Allocate the window blocks that tokens before position `end` are written to."""
        missing = -(-end // self.rules.block_size) - len(holding.pane_table)
        if missing > 0:
            holding.pane_table += tuple(self._store.take_panes(missing))

    def slide(self, holding: Holding, position: int) -> None:
        """Free the window blocks that no token from `position` on sees, which is the first that is not computed.

        Also free those after that token's block, which rejected drafts had used.
        """
        first = min(self.rules.first(position), len(holding.pane_table))
        end = position // self.rules.block_size + 1
        if first == holding.first_pane and end >= len(holding.pane_table):
            return
        self._store.release_panes(holding.pane_table[holding.first_pane : first] + holding.pane_table[end:])
        holding.pane_table = (0,) * first + holding.pane_table[first:end]
        holding.first_pane = first

    def give_back(self, holding: Holding) -> None:
        """Free all window blocks of the request."""
        self._store.release_panes(holding.pane_table[holding.first_pane :])
        holding.pane_table, holding.first_pane = (), 0
        self.promise(holding, 0)

    def check_integrity(self, holdings: Sequence[Holding]) -> None:
        """Raise AssertionError unless what is promised is what was counted, and enough for what is held."""
        own = self.rules.own
        assert self._own == sum(min(each.num_promised, own) for each in holdings), "promised panes were miscounted"
        beyond = sum(max(each.num_promised - own, 0) for each in holdings)
        assert self._beyond == beyond, "blocks beyond promised panes were miscounted"
        assert self.num_left >= 0, "more panes are promised than there are"
        for each in holdings:
            assert len(each.pane_table) <= each.num_promised, "a request has panes that it was not promised"
