"""Where one request's checkpoints go: at which positions the state is kept, in which mode, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ostinato.cache.index import Checkpoint

StateCacheMode = Literal["none", "align", "all"]

SHARE = 4
"""One request may place at most one in so many of the evictable slots."""


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """What of a request is kept for others. All values come from the plan."""

    prefix_caching: bool = False
    mode: StateCacheMode = "none"
    state_block_size: int = 256
    """Tokens between checkpoints inside a text; a multiple of the block size."""
    branches: bool = True
    """Whether to take one where a prompt leaves an indexed text, at the end of their common blocks."""


@dataclass(slots=True)
class Placement:
    """The positions of one request's checkpoints, from its admission on.

    Besides `last`, the last block boundary strictly before the end of its known tokens, and `branch` (0: none), there
    are those at multiples of `spacing`, no more than `share` of them at a time: where one more is due, the spacing
    doubles and those that are off it are given up.
    """

    mode: StateCacheMode
    spacing: int
    last: int
    branch: int
    share: int
    placed: dict[int, Checkpoint | None] = field(default_factory=dict)
    """Those at multiples, by position; None until the step that writes it is over."""
    thinned: list[Checkpoint] = field(default_factory=list)
    """Given up by doubling, and not yet taken out of the index."""

    def chunk_end(self, start: int, limit: int) -> int:
        """Where a chunk from `start` on ends that could go up to `limit`: more than `start`, at most `limit`."""
        if self.mode != "align":
            return limit
        for cut in (self.last, self.branch):
            if start < cut < limit:
                limit = cut
        multiple = limit // self.spacing * self.spacing if self.share else 0
        return multiple if multiple > start else limit

    def inside(self, start: int, end: int) -> list[int]:
        """The positions between `start` and `end`, both excluded, whose state a chunk has to write out."""
        if self.mode != "all":
            return []
        wanted = {position for position in (self.last, self.branch) if start < position < end}
        first = start // self.spacing * self.spacing + self.spacing
        for position in range(first, end, self.spacing):
            self.claims(position)
        wanted.update(position for position in self.placed if start < position < end)
        return sorted(wanted)

    def claims(self, position: int) -> bool:
        """Whether a checkpoint belongs at `position` only because it is a multiple; makes room for it if so."""
        if self.mode == "none" or self.share == 0 or not self.is_interior(position):
            return False
        if position in self.placed:
            return True
        while position % self.spacing == 0 and len(self.placed) >= self.share:
            self.spacing *= 2
            off = [place for place in self.placed if place % self.spacing]
            for place in off:
                checkpoint = self.placed.pop(place)
                if checkpoint is not None:
                    self.thinned.append(checkpoint)
        if position % self.spacing:
            return False
        self.placed[position] = None
        return True

    def settle(self) -> list[Checkpoint]:
        """Forget the multiples whose checkpoint was not taken after all. -> those to be given up."""
        self.placed = {position: each for position, each in self.placed.items() if each is not None}
        thinned, self.thinned = self.thinned, []
        return thinned

    def is_interior(self, position: int) -> bool:
        """Whether `position` matters only as a multiple."""
        return position not in (self.last, self.branch)


def place_checkpoints(
    policy: CachePolicy, block_size: int, num_tokens: int, hit: int, num_matched: int, num_evictable: int
) -> Placement:
    """For a request with `num_tokens` known tokens, the first `hit` of them cached.

    The blocks of the first `num_matched` are indexed: where they go on beyond the hit, the request leaves an indexed
    text at a point without a checkpoint. `num_evictable` slots are there for all checkpoints.
    """
    last = (num_tokens - 1) // block_size * block_size
    branch = num_matched if policy.branches and num_matched > hit else 0
    share = max(0, num_evictable // SHARE - (last > hit) - (0 < branch < last))
    apart = {cut for cut in (last, branch) if cut > hit}
    spacing = policy.state_block_size
    while share:
        multiples = (num_tokens - 1) // spacing - hit // spacing
        if multiples - sum(cut % spacing == 0 for cut in apart) <= share:
            break
        spacing *= 2
    return Placement(policy.mode, spacing, last, branch, share)
