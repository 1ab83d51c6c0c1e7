"""A pool of ids with reference counts. Blocks and slots are such ids; their memory is the runner's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class IdPool:
    """Allocator of the ids 1 to `count - 1`; id 0 is the null id, which has no owner and is never allocated.

    Requests hold references: `allocate` sets an id's count to 1, `retain` and `release` change it. Besides, the prefix
    index may *keep* an id. An id that is kept and not referenced is *idle*: it holds something that can be found again,
    and the index can `drop` it when its memory is needed. An id that is neither is free. Every operation costs O(1) per
    id. The order is deterministic: a new pool allocates the lowest ids first, later the ids that became free last.

    A `count` of 0 means that the model has no such memory; nothing can be allocated, and nothing needs to be. Freeing
    an id that is not held is a bug in the caller, and an AssertionError.
    """

    def __init__(self, name: str, count: int) -> None:
        assert count >= 0, f"a pool cannot have {count} {name}s"
        self.name = name
        self.count = count
        self._references = [0] * count
        self._kept = bytearray(count)
        self._num_idle = 0
        # A stack: the id that is allocated next is at the end.
        self._free = list(range(count - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Number of ids that can be in use at once: all but the null id."""
        return max(self.count - 1, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of ids kept by the index and not referenced."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Number of ids that are free, or would be after dropping idle ones."""
        return len(self._free) + self._num_idle

    @property
    def num_used(self) -> int:
        """Number of ids referenced by requests."""
        return self.capacity - len(self._free) - self._num_idle

    def references(self, id: int) -> int:
        return self._references[id]

    def is_cached(self, id: int) -> bool:
        return bool(self._kept[id])

    def is_idle(self, id: int) -> bool:
        return bool(self._kept[id]) and self._references[id] == 0

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` ids, each with one reference; return None, and allocate nothing, if fewer are free."""
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

    def retain(self, ids: Iterable[int]) -> None:
        """Add one reference to each of `ids`, which are all referenced or kept."""
        for id in ids:
            self._check_in_use(id)
            self._num_idle -= self._references[id] == 0
            self._references[id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Drop one reference from each of `ids`; the first of those that become free is allocated next."""
        for id in reversed(ids):
            self._check_referenced(id)
            self._references[id] -= 1
            if self._references[id] == 0:
                if self._kept[id]:
                    self._num_idle += 1
                else:
                    self._free.append(id)

    def mark_cached(self, id: int) -> None:
        """Let the index keep an id that is referenced; it stays when the last reference goes."""
        self._check_referenced(id)
        assert not self._kept[id], f"{self.name} {id} is in the index already"
        self._kept[id] = 1

    def unmark_cached(self, id: int) -> None:
        """Let the index drop an id that it keeps, which is free then unless it is referenced."""
        assert self._kept[id], f"{self.name} {id} is not in the index"
        self._kept[id] = 0
        if self._references[id] == 0:
            self._num_idle -= 1
            self._free.append(id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each id but the null one is free, or referenced, or kept. O(count)."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.name} is twice in the free list"
        assert 0 not in free, f"the null {self.name} is in the free list"
        assert not self._references or self._references[0] == 0, f"the null {self.name} is referenced"
        assert not self._kept or not self._kept[0], f"the null {self.name} is in the index"
        for id in range(1, self.count):
            references = self._references[id]
            in_use = references > 0 or bool(self._kept[id])
            assert references >= 0, f"{self.name} {id} has {references} references"
            assert not in_use or id not in free, f"{self.name} {id} is both free and in use"
            assert in_use or id in free, f"{self.name} {id} is neither free nor in use: it leaked"
        idle = sum(map(self.is_idle, range(1, self.count)))
        assert idle == self._num_idle, f"{idle} {self.name}s are idle, and {self._num_idle} were counted"

    def _check_in_use(self, id: int) -> None:
        assert 0 < id < self.count, f"{self.name} {id} is not one of the pool's"
        assert self._references[id] > 0 or self._kept[id], f"{self.name} {id} is not in use"

    def _check_referenced(self, id: int) -> None:
        assert 0 < id < self.count, f"{self.name} {id} is not one of the pool's"
        assert self._references[id] > 0, f"{self.name} {id} is not in use"
