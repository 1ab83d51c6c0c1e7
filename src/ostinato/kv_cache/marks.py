"""Marks: positions at which an application wants a checkpoint, and the pins that keep these checkpoints for a time.

A pinned checkpoint is evicted last: for the memory of a running request, if nothing else is left, and for nothing else.
Time is the arrival of the newest request, so that what the cache does is a function of the requests alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.kv_cache.prefix_index import IndexEntry, Pin
from ostinato.observe.counts import StoreCounts

MAX_MARKS = 4
"""Marks of one request. Each of them may cost a cut of the prompt, and so a step."""

DEFAULT_TTL = 300.0
"""Seconds for which a mark without a time is pinned."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position of a prompt up to which later prompts will share it.

    The checkpoint stands at the last block boundary at or before `position`, and is pinned for `ttl` seconds from its
    last use on.
    """

    position: int
    ttl: float = DEFAULT_TTL

    def boundary(self, block_size: int) -> int:
        """Return the position of its checkpoint; 0 if no block ends before it."""
        return self.position // block_size * block_size


class PinRegistry:
    """The pinned entries of an index, at most `max_pins` of them with at most `max_blocks` blocks up to them.

    Clients have equal shares. If there is no room for one more, the client with the most pins gives up the one that
    ends first; a client with no more than the newcomer gives up none.
    """

    def __init__(self, counters: StoreCounts, max_pins: int, max_blocks: int, blocks_per_window: int) -> None:
        self.max_pins, self.max_blocks = max_pins, max_blocks
        self.time = 0.0
        """Arrival of the newest request, in seconds."""
        self.num_blocks = 0
        """Blocks of all pinned prefixes, each counted once."""
        self._counters = counters
        self._blocks_per_window = blocks_per_window
        self.pinned: dict[IndexEntry, Pin] = {}
        """The pinned entries, the oldest pin first."""
        self._next_end = 0.0

    def advance(self, now: float) -> None:
        """Note the arrival of a request at time `now`, and end the pins whose time is over."""
        self.time = max(self.time, now)
        if not self.pinned or self.time < self._next_end:
            return
        for entry in [entry for entry, pin in self.pinned.items() if pin.end <= self.time]:
            self._remove(entry)
            self._counters.pins_expired += 1
        self._next_end = min((pin.end for pin in self.pinned.values()), default=0.0)

    def pin(self, entry: IndexEntry, ttl: float, client: str | None) -> bool:
        """Pin an entry for `ttl` seconds from now on; return False if the limits leave no room for it.

        An entry that is pinned already keeps its client, and its time begins anew. Of several times from that client
        the longest counts; others cannot lengthen what counts in its share.
        """
        pin = entry.pin
        if pin is not None:
            if pin.client == client:
                pin.ttl = max(pin.ttl, ttl)
            self.refresh(entry)
            return True
        displaced = self._choose_displaced(entry, client)
        if displaced is None:
            self._counters.pins_refused += 1
            return False
        for each in displaced:
            self._remove(each)
            self._counters.pins_displaced += 1
        entry.pin = self.pinned[entry] = Pin(client, ttl, self.time + ttl)
        self._next_end = min(self._next_end, entry.pin.end) if len(self.pinned) > 1 else entry.pin.end
        for each in _path(entry):
            self.num_blocks += each.num_pinned == 0
            each.num_pinned += 1
        for each in self._window(entry):
            each.num_windows_pinned += 1
        self._counters.pins_taken += 1
        return True

    def refresh(self, entry: IndexEntry) -> None:
        """Let the time of a pinned entry begin anew, because a request has used it."""
        assert entry.pin is not None, "the entry is not pinned"
        entry.pin.end = max(entry.pin.end, self.time + entry.pin.ttl)

    def lose(self, entry: IndexEntry) -> None:
        """End the pin of an entry whose block or checkpoint leaves the index."""
        self._remove(entry)
        self._counters.pins_lost += 1

    def lose_window(self, entry: IndexEntry) -> None:
        """End the pins of all entries that cannot be hit without this one's window block, which leaves the index."""
        for pinned in [pinned for pinned in self.pinned if entry in self._window(pinned)]:
            self.lose(pinned)

    def clear(self) -> None:
        """End all pins before their time."""
        for entry in list(self.pinned):
            self.lose(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts and limits hold. O(pins x blocks)."""
        paths = Counter(each for entry in self.pinned for each in _path(entry))
        windows = Counter(each for entry in self.pinned for each in self._window(entry))
        assert len(self.pinned) <= self.max_pins, "more is pinned than may be"
        assert self.num_blocks == len(paths) <= self.max_blocks, "blocks of pinned prefixes were miscounted"
        for entry in paths:
            assert (entry.num_pinned, entry.num_windows_pinned) == (paths[entry], windows[entry]), (
                "an entry has another number of pins after it"
            )
        for entry, pin in self.pinned.items():
            assert entry.pin is pin, "a pin belongs to another entry"
            assert pin.end > self.time, "a pin outlived its time"

    def _choose_displaced(self, entry: IndexEntry, client: str | None) -> list[IndexEntry] | None:
        """Return the pins of clients above their share that end to make room for one more; None if it has no room.

        Ends none itself, so that a pin that is refused costs no other.
        """
        path = dict.fromkeys(_path(entry))
        if self.max_pins == 0 or len(path) > self.max_blocks:
            return None
        staying, displaced = dict(self.pinned), list[IndexEntry]()
        num_blocks = self.num_blocks + sum(each.num_pinned == 0 for each in path)
        num_ended = Counter[IndexEntry]()
        while len(staying) >= self.max_pins or num_blocks > self.max_blocks:
            counts = Counter([pin.client for pin in staying.values()] + [client])
            # Among clients with equally many pins, it is the newcomer that gives one up.
            largest = max(counts, key=lambda each: (counts[each], each == client))
            ends = {each: pin.end for each, pin in staying.items() if pin.client == largest}
            if not ends:
                return None
            displaced.append(min(ends, key=ends.__getitem__))
            del staying[displaced[-1]]
            for each in _path(displaced[-1]):
                num_ended[each] += 1
                num_blocks -= num_ended[each] == each.num_pinned and each not in path
        return displaced

    def _remove(self, entry: IndexEntry) -> None:
        del self.pinned[entry]
        entry.pin = None
        for each in _path(entry):
            each.num_pinned -= 1
            self.num_blocks -= each.num_pinned == 0
        for each in self._window(entry):
            each.num_windows_pinned -= 1

    def _window(self, entry: IndexEntry) -> list[IndexEntry]:
        """Return the entries whose window blocks a hit at `entry` needs."""
        return [each for each, _ in zip(_path(entry), range(self._blocks_per_window), strict=False)]


def _path(entry: IndexEntry | None) -> Iterator[IndexEntry]:
    """Yield an entry and those before it, up to the first block."""
    while entry is not None:
        yield entry
        entry = entry.parent
