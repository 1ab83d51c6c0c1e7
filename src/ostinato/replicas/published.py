"""What a replica tells of its prefix index: the chain hashes at which a prompt may hit, as changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from ostinato.cache.index import Entry, PrefixIndex

MOST_KEYS = 2**14
"""Chain hashes that one replica tells of; 8 bytes each on their way."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Number `number` of one replica, from 0. Where `is_whole`, `added` is everything and nothing from before holds."""

    number: int
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_whole: bool = False


def hit_keys(index: PrefixIndex, has_state: bool, most: int = MOST_KEYS) -> frozenset[int]:
    """The hashes of the chains up to which a prompt can be taken from the index: those with a checkpoint, or without
    state layers all. Of more than `most`, those used last. O(entries)."""
    entries: list[Entry] = [each.entry for each in index.checkpoints] if has_state else list(index)
    if len(entries) > most:
        entries = nlargest(most, entries, key=_last_use)
    return frozenset([entry.key for entry in entries])


def _last_use(entry: Entry) -> tuple[int, int]:
    """Of two that one request used, the one further on saves more."""
    return max(entry.last_use, -1 if entry.checkpoint is None else entry.checkpoint.last_use), entry.end


class Publisher:
    """The replica's side: remembers what it has told."""

    def __init__(self) -> None:
        self._told: frozenset[int] | None = None
        self._number = 0

    def changes(self, keys: frozenset[int], whole: bool = False) -> Changes | None:
        """What is new since the last call, or everything at first and where `whole`; None where nothing is."""
        told = self._told
        if told is None or whole:
            message = Changes(self._number, tuple(sorted(keys)), is_whole=True)
        elif keys != told:
            message = Changes(self._number, tuple(sorted(keys - told)), tuple(sorted(told - keys)))
        else:
            return None
        self._told = keys
        self._number += 1
        return message


class Published:
    """The router's side, of one replica."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._next: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_known(self) -> bool:
        """Whether everything that the replica told has arrived. If not, nothing of it counts as cached."""
        return self._next is not None

    def apply(self, changes: Changes) -> bool:
        """Take in a message. False if one before it is missing: then the replica is to tell everything anew."""
        if changes.is_whole:
            self._keys = set(changes.added)
        elif changes.number == self._next:
            self._keys.difference_update(changes.removed)
            self._keys.update(changes.added)
        else:
            self._keys.clear()
            self._next = None
            return False
        self._next = changes.number + 1
        return True

    def depth(self, keys: Sequence[int]) -> int:
        """How many blocks of the chain `keys` the replica has up to its last checkpoint in it."""
        for depth in range(len(keys), 0, -1):
            if keys[depth - 1] in self._keys:
                return depth
        return 0
