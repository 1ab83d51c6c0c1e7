"""A pool of ids with reference counts. Blocks and slots are such ids; their memory is the runner's."""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """Hands out the ids 1 to `count - 1`; id 0 is the null one, which is nobody's and is never handed out.

    An id is free while its reference count is 0. `allocate` sets the count to 1, `retain` and `release` move
    it, and the release of the last reference makes the id free again. Every operation costs O(1) per id. The
    order is deterministic: a new pool hands out the lowest ids first, later the ids that were released last.

    A `count` of 0 means that the model has no such memory; nothing can be allocated, and nothing needs to be.
    Handing back what is not held is a bug in the caller, and an AssertionError.
    """

    def __init__(self, name: str, count: int) -> None:
        assert count >= 0, f"a pool cannot have {count} {name}s"
        self.name = name
        self.count = count
        self._references = [0] * count
        # A stack: the id to be handed out next is at the end.
        self._free = list(range(count - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """How many ids can be in use at once: all but the null one."""
        return max(self.count - 1, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def references(self, id: int) -> int:
        return self._references[id]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` ids, each with one reference; None, and nothing is taken, if fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for id in taken:
            self._references[id] = 1
        return taken

    def retain(self, ids: Sequence[int]) -> None:
        """Add one reference to each of `ids`, which are all in use."""
        for id in ids:
            self._check_in_use(id)
            self._references[id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Drop one reference from each of `ids`; the first of those that become free is handed out first."""
        for id in reversed(ids):
            self._check_in_use(id)
            self._references[id] -= 1
            if self._references[id] == 0:
                self._free.append(id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each id but the null one is either free or referenced. O(count)."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.name} is twice in the free list"
        assert 0 not in free, f"the null {self.name} is in the free list"
        assert not self._references or self._references[0] == 0, f"the null {self.name} is referenced"
        for id in range(1, self.count):
            references = self._references[id]
            assert references >= 0, f"{self.name} {id} has {references} references"
            assert references == 0 or id not in free, f"{self.name} {id} is both free and referenced"
            assert references > 0 or id in free, f"{self.name} {id} is neither free nor referenced: it leaked"

    def _check_in_use(self, id: int) -> None:
        assert 0 < id < self.count, f"{self.name} {id} is not one of the pool's"
        assert self._references[id] > 0, f"{self.name} {id} is not in use"
