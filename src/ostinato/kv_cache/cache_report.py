"""Report of a request's prefix cache hit, and of the causes of misses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.kv_cache.prefix_index import BlockHashes, IndexEntry


class MissCause(StrEnum):
    """Reasons why tokens of a prompt had to be computed."""

    NEVER_SEEN = "never_seen"
    """No cached prefix had these tokens after the tokens before them."""
    EVICTED_BLOCK = "evicted_block"
    """Evicted: the block of these tokens was in the index and had to make room."""
    EVICTED_CHECKPOINT = "evicted_checkpoint"
    """Evicted state: the blocks of these tokens are cached; the state after them was, and had to make room."""
    NO_CHECKPOINT = "no_checkpoint"
    """No state: the blocks of these tokens are cached, and the state after them was not kept."""
    EVICTED_WINDOW = "evicted_window"
    """Evicted window: blocks and state are cached, but keys and values of layers with a window had to make room.

    Later tokens see those.
    """
    RECOMPUTED_TAIL = "recomputed_tail"
    """After the last block boundary before the prompt's end: less than a block, or the block of the last token."""
    DAMAGED = "damaged"
    """A file of the cache that would have had them, or the state after them, could not be read."""
    NOT_WANTED = "not_wanted"
    """The cache may not be used: it is off, or the request wants log-probabilities of its prompt."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Cache hit of one prompt. `cached_tokens` and `misses` (cause -> tokens) together add up to its length."""

    cached_tokens: int
    misses: dict[str, int] = field(default_factory=dict)
    checkpoint_spacing: int | None = None
    """Tokens between the checkpoints inside this prompt, if any are wanted there. It is `state_block_size`, doubled
    until the request takes no more than its share of the slots."""
    from_files: int = 0
    """Cached tokens that files brought back for this request."""


class RecentKeys:
    """Hashes of blocks that left the index, the last `max_keys` of them."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def add(self, key: int) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def discard(self, key: int) -> None:
        self._keys.pop(key, None)


def explain_misses(
    num_tokens: int,
    hit: int,
    matched: Sequence[IndexEntry],
    block_hashes: BlockHashes,
    evicted: RecentKeys,
    damaged: RecentKeys,
    reach: int = 0,
) -> dict[str, int]:
    """Return {cause: tokens} of a prompt of `num_tokens` tokens whose first `hit` are taken from the cache.

    `matched` are the entries of its blocks before the last boundary, up to the first that is not indexed; `damaged` are
    the hashes of blocks that had a file, or whose state had one, which could not be read; `reach` is that of `Match`.
    """
    causes: dict[MissCause, int] = dict.fromkeys(MissCause, 0)
    size = block_hashes.block_size
    boundary = (num_tokens - 1) // size * size
    keys = block_hashes.keys[: boundary // size]
    lost = max((entry.end for entry in matched[hit // size :] if entry.lost_checkpoint), default=hit)
    unread = max(((i + 1) * size for i, key in enumerate(keys) if key in damaged), default=0) if damaged else 0
    for index in range(hit // size, len(keys)):
        end = (index + 1) * size
        if end <= unread:
            cause = MissCause.DAMAGED
        elif end <= reach:
            cause = MissCause.EVICTED_WINDOW
        elif index < len(matched):
            cause = MissCause.EVICTED_CHECKPOINT if end <= lost else MissCause.NO_CHECKPOINT
        else:
            cause = MissCause.EVICTED_BLOCK if keys[index] in evicted else MissCause.NEVER_SEEN
        causes[cause] += size
    causes[MissCause.RECOMPUTED_TAIL] = num_tokens - boundary
    return {cause.value: tokens for cause, tokens in causes.items() if tokens}
