"""Reports of a replica's prefix index: the block hashes at which a prompt may hit, sent as changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexChanges:
    """Changes of one replica's index, numbered from 0. If `is_whole`, `added` replaces what was before."""

    number: int
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_whole: bool = False


class IndexPublisher:
    """The replica's side, which remembers what it has reported."""

    def __init__(self) -> None:
        self._reported: frozenset[int] | None = None
        self._number = 0

    def changes(self, keys: frozenset[int], whole: bool = False) -> IndexChanges | None:
        """Return the changes since the last call, or everything at first and if `whole`; None without changes."""
        reported = self._reported
        if reported is None or whole:
            message = IndexChanges(self._number, tuple(sorted(keys)), is_whole=True)
        elif keys != reported:
            message = IndexChanges(self._number, tuple(sorted(keys - reported)), tuple(sorted(reported - keys)))
        else:
            return None
        self._reported = keys
        self._number += 1
        return message


class PublishedIndex:
    """The router's side, for one replica."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._next: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_known(self) -> bool:
        """True if all reports of the replica have arrived. If not, nothing counts as cached there."""
        return self._next is not None

    def apply(self, changes: IndexChanges) -> bool:
        """Apply a report. Returns False if one before it is missing: then the replica must report everything anew."""
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
        """Return how many of the blocks with hashes `keys` the replica has, up to its last checkpoint among them."""
        for depth in range(len(keys), 0, -1):
            if keys[depth - 1] in self._keys:
                return depth
        return 0
