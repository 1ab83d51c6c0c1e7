"""A picture of the prefix index: the cached prefixes as branches of a tree, without a word of their text."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass
from heapq import nlargest
from itertools import islice

from ostinato.kv_cache.prefix_index import IndexEntry, PrefixIndex

MAX_BRANCH_TEXTS = 12
MAX_SNAPSHOT_ENTRIES = 20_000
"""Entries that a picture looks at: it is made between two steps, which wait for it."""
MAX_SNAPSHOT_LEAVES = 4096
"""Leaves among which the most recently used are looked for."""


MAX_PUBLISHED_KEYS = 2**14
"""Most block hashes that one replica reports; 8 bytes each in a message."""


@dataclass(frozen=True, slots=True)
class IndexMark:
    """A checkpoint, or a point up to which requests took a prefix from the index, `at` tokens after the start."""

    at: int
    hits: int
    is_checkpoint: bool


@dataclass(frozen=True, slots=True)
class IndexBranch:
    """One prefix from where it leaves the branches before it. `begin` and `end` are positions in tokens."""

    parent: int | None
    """The number of the branch that it leaves, always a lower one; None if it starts at the root."""
    begin: int
    end: int
    is_used: bool
    """True if a running request uses it."""
    marks: tuple[IndexMark, ...]


def snapshot_index(
    index: PrefixIndex, most_texts: int = MAX_BRANCH_TEXTS, most_entries: int = MAX_SNAPSHOT_ENTRIES
) -> dict[str, object]:
    """Return plain data: numbers of leaves, blocks and checkpoints, and `branches` (see `IndexBranch`).

    The branches are of the prefixes used last: at most `most_texts` of them, and fewer if together they have more than
    `most_entries` blocks. It costs at most `most_entries` steps, however much is in the index.
    """
    leaves = heapq.nlargest(
        most_texts, islice(index.newest_leaves, MAX_SNAPSHOT_LEAVES), key=lambda leaf: leaf.last_use
    )
    branches: list[IndexBranch] = []
    owner: dict[int, int] = {}
    for leaf in leaves:
        path = _new_part(leaf, owner, most_entries)
        if len(owner) + len(path) > most_entries:
            break
        first = path[-1]
        parent = None if first.parent is None else owner[first.parent.key]
        owner.update((entry.key, len(branches)) for entry in path)
        begin = first.end - len(first.token_ids)
        marks = tuple(mark for entry in reversed(path) if (mark := _mark(entry)) is not None)
        branches.append(IndexBranch(parent, begin, leaf.end, any(entry.num_holders for entry in path), marks))
    return {
        "texts": index.num_leaves,
        "blocks": len(index),
        "checkpoints": index.num_checkpoints,
        "branches": [asdict(branch) for branch in branches],
    }


def _new_part(leaf: IndexEntry, known: dict[int, int], max_keys: int) -> list[IndexEntry]:
    """Return the entries from a leaf towards the root, up to the first known one; at most `max_keys` + 1."""
    path: list[IndexEntry] = []
    entry: IndexEntry | None = leaf
    while entry is not None and entry.key not in known and len(path) <= max_keys:
        path.append(entry)
        entry = entry.parent
    return path


def _mark(entry: IndexEntry) -> IndexMark | None:
    if entry.checkpoint is not None:
        return IndexMark(entry.end, entry.checkpoint.hits, True)
    return IndexMark(entry.end, entry.hits, False) if entry.hits else None


def prefix_hit_keys(index: PrefixIndex, has_state: bool, max_keys: int = MAX_PUBLISHED_KEYS) -> frozenset[int]:
    """Return the block hashes at which a prompt may hit the index.

    These are the hashes with a checkpoint, or all without state layers. If there are more than `max_keys`, those used
    last. O(entries).
    """
    entries: list[IndexEntry] = [checkpoint.entry for checkpoint in index.checkpoints] if has_state else list(index)
    if len(entries) > max_keys:
        entries = nlargest(max_keys, entries, key=_last_use)
    return frozenset([entry.key for entry in entries])


def _last_use(entry: IndexEntry) -> tuple[int, int]:
    """Return the sort key by last use. Of two entries that one request used, the longer prefix saves more."""
    return max(entry.last_use, -1 if entry.checkpoint is None else entry.checkpoint.last_use), entry.end
