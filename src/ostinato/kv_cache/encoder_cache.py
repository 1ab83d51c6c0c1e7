"""The encoder cache: a record of the cells that hold the vision encoder's outputs for each image. Bookkeeping only."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.observe.counts import EncoderCacheCounts


class PinnedImage(NamedTuple):
    """An image that a request holds."""

    cells: tuple[int, ...]
    """Cells of the image, one per token, in order."""
    is_new: bool
    """True if the step being scheduled has to encode the image: its cells hold nothing yet."""


@dataclass(slots=True, eq=False)
class _Entry:
    cells: tuple[int, ...]
    num_holders: int = 0
    """Requests that hold it; evictable at 0."""


class EncoderCache:
    """Allocator of cells for images, which keeps their contents until the room is needed.

    An image is known by its digest, and has one cell per token. A request *pins* the images that tokens of its next
    step belong to, and a pinned image stays. An unpinned image stays until its cells are needed; the least recently
    used goes first. An image that a step is to encode is *pending* until `finish_step` reports whether the step
    succeeded; if it failed, the image is forgotten. Cell 0 of the `num_cells` is the null cell, which is never
    allocated: text and padding tokens point at it.
    """

    def __init__(self, num_cells: int) -> None:
        assert num_cells >= 1, "there is always the null cell"
        self.num_cells = num_cells
        self.counters = EncoderCacheCounts()
        # Idle images have no holders, the least recently used first; an image is in one of the two.
        self._idle: OrderedDict[str, _Entry] = OrderedDict()
        self._pinned: dict[str, _Entry] = {}
        self._pending: set[str] = set()
        self._digests_of: dict[str, set[str]] = {}
        # A stack: the cell that is allocated next is at the end.
        self._free = list(range(num_cells - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """The most tokens of images that it can hold at once."""
        return self.num_cells - 1

    @property
    def num_pinned(self) -> int:
        """Cells of images that requests hold."""
        return sum(len(entry.cells) for entry in self._pinned.values())

    @property
    def num_cached(self) -> int:
        """Cells of images that no request holds."""
        return self.capacity - len(self._free) - self.num_pinned

    @property
    def num_items(self) -> int:
        return len(self._idle) + len(self._pinned)

    def num_fitting(self, items: Sequence[tuple[str, int]]) -> int:
        """Return how many of these images, (digest, tokens) each, from the first on, could be pinned at once now."""
        room = self.capacity - self.num_pinned
        seen: set[str] = set()
        for count, (digest, num_tokens) in enumerate(items):
            if digest in self._pinned or digest in seen:
                continue
            seen.add(digest)
            room -= num_tokens
            if room < 0:
                return count
        return len(items)

    def pin(self, request_id: str, items: Sequence[tuple[str, int]]) -> list[PinnedImage]:
        """Pin images, (digest, tokens) each, for which `num_fitting` found room.

        Images that are not cached get cells, which may evict images that no request holds. Images that the request
        already holds stay pinned.
        """
        assert items, "a request takes at least one image"
        digests = self._digests_of.setdefault(request_id, set())
        pinned: dict[str, PinnedImage] = {}
        # Cached images come first, so that none of them is evicted for another one.
        for digest, num_tokens in items:
            entry = self._pinned.get(digest) or self._idle.get(digest)
            if entry is None or digest in pinned:
                continue
            pinned[digest] = PinnedImage(entry.cells, is_new=False)
            if digest not in digests:
                self._pin(digest, entry, digests)
                self.counters.hits += 1
                self.counters.hit_tokens += num_tokens
        for digest, num_tokens in items:
            if digest not in pinned:
                entry = _Entry(self._allocate(num_tokens))
                pinned[digest] = PinnedImage(entry.cells, is_new=True)
                self._pin(digest, entry, digests)
                self._pending.add(digest)
                self.counters.misses += 1
                self.counters.encoded_tokens += num_tokens
        assert all(len(pinned[digest].cells) == num_tokens for digest, num_tokens in items), (
            "two images of one digest have different numbers of tokens"
        )
        return [pinned[digest] for digest, _ in items]

    def unpin_except(self, request_id: str, digests: Collection[str]) -> None:
        """Unpin all images of the request but `digests`, after a step of it succeeded."""
        pinned = self._digests_of.get(request_id)
        if pinned is None:
            return
        for digest in sorted(pinned.difference(digests)):
            self._unpin(digest)
        pinned.intersection_update(digests)
        if not pinned:
            del self._digests_of[request_id]

    def unpin_all(self, request_id: str, may_be_corrupt: bool = False) -> None:
        """Unpin all images of the request.

        With `may_be_corrupt`, the outputs of its images may be wrong, and the images that no other request holds are
        forgotten.
        """
        for digest in sorted(self._digests_of.pop(request_id, ())):
            self._unpin(digest)
            if may_be_corrupt and digest in self._idle:
                self._forget(digest)

    def finish_step(self, succeeded: bool) -> None:
        """Mark the images of the finished step as encoded, or forget them if it failed.

        After a failed step, no request may hold them any more.
        """
        for digest in sorted(self._pending) if not succeeded else ():
            assert digest not in self._pinned, "an image of a failed step is pinned by a request that is still running"
            if digest in self._idle:
                self._forget(digest)
        self._pending.clear()

    def clear(self) -> None:
        """Remove all images that no request holds, as if they had never been seen."""
        for digest in list(self._idle):
            self._forget(digest)

    def request_ids(self) -> set[str]:
        """Return the ids of the requests that hold images."""
        return set(self._digests_of)

    def pinned_by(self, request_id: str) -> Collection[str]:
        """Return the digests of the images that the request holds."""
        return self._digests_of.get(request_id, frozenset())

    def check_integrity(self) -> None:
        """Raise AssertionError unless every cell but the null one is free or one image's, and holders are exact."""
        assert not self._idle.keys() & self._pinned.keys(), "an image is both held and idle"
        entries = {**self._idle, **self._pinned}
        used = Counter(cell for entry in entries.values() for cell in entry.cells)
        cells = used + Counter(self._free)
        assert cells == Counter(range(1, self.num_cells)), "a cell leaked, or has two owners, or is the null one"
        holders = Counter(digest for digests in self._digests_of.values() for digest in digests)
        assert holders == Counter({digest: entry.num_holders for digest, entry in self._pinned.items()}), (
            "an image has another number of holders than requests that hold it"
        )
        assert not any(entry.num_holders for entry in self._idle.values()), "an idle image is held"
        assert all(self._digests_of.values()), "a request is listed without a pinned image"
        assert self._pending <= self._pinned.keys(), "a pending image is pinned by no request"

    def _allocate(self, num_tokens: int) -> tuple[int, ...]:
        while len(self._free) < num_tokens:
            assert self._idle, "images are taken that `num_fitting` found no room for"
            digest, entry = next(iter(self._idle.items()))
            self.counters.evicted_items += 1
            self.counters.evicted_tokens += len(entry.cells)
            self._forget(digest)
        cells = self._free[len(self._free) - num_tokens :]
        del self._free[len(self._free) - num_tokens :]
        return tuple(reversed(cells))

    def _pin(self, digest: str, entry: _Entry, digests: set[str]) -> None:
        self._idle.pop(digest, None)
        self._pinned[digest] = entry
        entry.num_holders += 1
        digests.add(digest)

    def _unpin(self, digest: str) -> None:
        entry = self._pinned[digest]
        entry.num_holders -= 1
        if entry.num_holders == 0:
            del self._pinned[digest]
            self._idle[digest] = entry  # last in order: used last

    def _forget(self, digest: str) -> None:
        entry = self._idle.pop(digest)
        self._free.extend(reversed(entry.cells))
