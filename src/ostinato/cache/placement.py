"""The positions, mode and number of one request's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ostinato.cache.index import Checkpoint

StateCacheMode = Literal["none", "align", "all"]

SLOT_FRACTION = 4
"""Evictable slots per checkpoint that one request may add."""


@dataclass(frozen=True, slots=True)
class PrefixCachePolicy:
    """Policy on what of a request is kept for later requests. All values come from the plan."""

    prefix_caching: bool = False
    mode: StateCacheMode = "none"
    state_block_size: int = 256
    """Tokens between checkpoints inside a prompt; a multiple of the block size."""
    branches: bool = True
    """True to take a checkpoint where a prompt leaves an indexed prefix, at the end of their common blocks."""


@dataclass(slots=True)
class CheckpointPositions:
    """The positions of one request's checkpoints, from its admission on.

    They are `last`, the last block boundary strictly before the end of its known tokens, `branch` (0: none), and
    multiples of `spacing`, no more than `share` of these at a time: if one more is due, the spacing doubles and the
    checkpoints that are off it are removed.
    """

    mode: StateCacheMode
    spacing: int
    last: int
    branch: int
    max_interior: int
    interior: dict[int, Checkpoint | None] = field(default_factory=dict)
    """Checkpoints at multiples, by position; None until the step that writes it is over."""
    dropped: list[Checkpoint] = field(default_factory=list)
    """Checkpoints dropped by doubling, and not yet removed from the index."""

    def chunk_end(self, start: int, limit: int) -> int:
        """Return the end of a chunk from `start` on that could extend to `limit`: after `start`, at most `limit`."""
        if self.mode != "align":
            return limit
        for cut in (self.last, self.branch):
            if start < cut < limit:
                limit = cut
        multiple = limit // self.spacing * self.spacing if self.max_interior else 0
        return multiple if multiple > start else limit

    def positions_inside(self, start: int, end: int) -> list[int]:
        """Return the positions between `start` and `end`, both excluded, whose state a chunk has to write out."""
        if self.mode != "all":
            return []
        wanted = {position for position in (self.last, self.branch) if start < position < end}
        first = start // self.spacing * self.spacing + self.spacing
        for position in range(first, end, self.spacing):
            self.claim(position)
        wanted.update(position for position in self.interior if start < position < end)
        return sorted(wanted)

    def claim(self, position: int) -> bool:
        """Return whether a checkpoint belongs at `position` only as a multiple, and make room for it if so."""
        if self.mode == "none" or self.max_interior == 0 or not self.is_interior(position):
            return False
        if position in self.interior:
            return True
        while position % self.spacing == 0 and len(self.interior) >= self.max_interior:
            self.spacing *= 2
            off = [place for place in self.interior if place % self.spacing]
            for place in off:
                checkpoint = self.interior.pop(place)
                if checkpoint is not None:
                    self.dropped.append(checkpoint)
        if position % self.spacing:
            return False
        self.interior[position] = None
        return True

    def take_dropped(self) -> list[Checkpoint]:
        """Forget the multiples whose checkpoint was not taken after all. Return the checkpoints to be removed."""
        self.interior = {position: each for position, each in self.interior.items() if each is not None}
        thinned, self.dropped = self.dropped, []
        return thinned

    def is_interior(self, position: int) -> bool:
        """Return whether `position` matters only as a multiple."""
        return position not in (self.last, self.branch)


def plan_checkpoints(
    policy: PrefixCachePolicy, block_size: int, num_tokens: int, hit: int, num_matched: int, num_evictable: int
) -> CheckpointPositions:
    """Choose the checkpoints of a request with `num_tokens` known tokens, the first `hit` of them cached.

    The blocks of the first `num_matched` are indexed: if they extend beyond the hit, the request leaves an indexed
    prefix at a point without a checkpoint. All checkpoints share `num_evictable` slots.
    """
    last = (num_tokens - 1) // block_size * block_size
    branch = num_matched if policy.branches and num_matched > hit else 0
    share = max(0, num_evictable // SLOT_FRACTION - (last > hit) - (0 < branch < last))
    apart = {cut for cut in (last, branch) if cut > hit}
    spacing = policy.state_block_size
    while share:
        multiples = (num_tokens - 1) // spacing - hit // spacing
        if multiples - sum(cut % spacing == 0 for cut in apart) <= share:
            break
        spacing *= 2
    return CheckpointPositions(policy.mode, spacing, last, branch, share)
