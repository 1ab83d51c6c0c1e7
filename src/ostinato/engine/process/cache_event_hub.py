"""Cache events of an engine's process for their readers, each at its own pace within a bound."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from ostinato.json_io import JsonObject
from ostinato.kv_cache.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, CacheContents, CacheEvent

MAX_READERS = 16
"""Readers at once. Each may hold events that wait."""
MAX_WAITING = 2**16
"""Blocks and checkpoints that may wait for one reader, besides the replay of what is cached."""

log = logging.getLogger("ostinato.serve")


@dataclass(frozen=True, slots=True)
class CacheEventBatch:
    """Events of one moment. Batches are numbered from 1; those of a replay have the number of the last one before."""

    number: int
    time: float
    """Seconds since 1970."""
    events: Sequence[CacheEvent]
    replay_left: int | None = None
    """Batches of the replay that follow; None for a batch that is none of a replay."""


class SlowReader(Exception):
    """Raised for a reader that is dropped because more waits for it than may."""


class CacheReader:
    """One reader: first the contents of the cache, then what changes."""

    def __init__(self, name: str, replay: Iterator[CacheEventBatch]) -> None:
        self.name = name
        self._replay = replay
        self._waiting: deque[CacheEventBatch] = deque()
        self._size = 0
        self._news = asyncio.Event()
        self._ends = self._is_slow = False

    def put(self, batch: CacheEventBatch) -> bool:
        """Add a batch; return False if the reader is too slow. It then has nothing left but its error."""
        self._size += _size_of(batch)
        if self._size > MAX_WAITING:
            self._is_slow = True
            self._replay = iter(())
            self._waiting.clear()
        else:
            self._waiting.append(batch)
        self._news.set()
        return not self._is_slow

    def end(self) -> None:
        """End the reader once it has what waits."""
        self._ends = True
        self._news.set()

    async def batches(self, patience: float | None) -> AsyncIterator[CacheEventBatch | None]:
        """Yield batches as they come, and None after each `patience` seconds without one, if it is given.

        Raises SlowReader; ends with the engine.
        """
        while True:
            while (part := next(self._replay, None)) is not None:
                yield part
                await asyncio.sleep(0)  # each part takes a while to make and to encode, and there may be many
            while self._waiting:
                batch = self._waiting.popleft()
                self._size -= _size_of(batch)
                yield batch
            if self._is_slow:
                raise SlowReader
            if self._ends:
                return
            self._news.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._news.wait()
            except TimeoutError:
                yield None


def _size_of(batch: CacheEventBatch) -> int:
    return sum(
        len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1 for event in batch.events
    )


def medium_of(device: str) -> str:
    """Return where a device's blocks are, in vLLM's words."""
    return "CPU" if device == "cpu" else "GPU"


def event_fields(event: CacheEvent, block_size: int, medium: str) -> JsonObject:
    """Return an event's fields under vLLM's names, and its kind as `type`."""
    fields: JsonObject = {"type": type(event).__name__, **asdict(event)}
    if isinstance(event, BlockStored):
        fields |= {"block_size": block_size, "lora_id": None}
    if not isinstance(event, AllBlocksCleared):
        fields["medium"] = medium
    return fields


class CacheEventHub:
    """Contents of an engine's prefix index by its events, and their readers. Used on one event loop."""

    def __init__(self, with_tokens: bool) -> None:
        self._with_tokens = with_tokens
        self._contents = CacheContents()
        self._readers: set[CacheReader] = set()
        self._number = 0
        self._has_ended = False

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Pass on events to all readers."""
        for event in events:
            if isinstance(event, BlockStored) and not self._with_tokens:
                event.token_ids = []
            self._contents.apply(event)
        self._number += 1
        batch = CacheEventBatch(self._number, time.time(), events)
        for reader in [reader for reader in self._readers if not reader.put(batch)]:
            self._readers.discard(reader)
            log.warning("%s reads cache events too slowly, and is dropped: %d waited", reader.name, MAX_WAITING)

    def add_reader(self, name: str) -> CacheReader | None:
        """Add a reader, which gets what is cached now first; None if there are too many. `name` is for the log."""
        if len(self._readers) >= MAX_READERS:
            return None
        number, now = self._number, time.time()
        parts = self._contents.replay()
        reader = CacheReader(name, (CacheEventBatch(number, now, events, left) for left, events in parts))
        if self._has_ended:
            reader.end()
        else:
            self._readers.add(reader)
        return reader

    def replay(self) -> Iterator[CacheEvent]:
        """Return events that lead from an empty index to what is cached now, which later changes do not touch."""
        return chain.from_iterable(events for _, events in self._contents.replay())

    def remove_reader(self, reader: CacheReader) -> None:
        self._readers.discard(reader)

    def end(self) -> None:
        """End all readers."""
        self._has_ended = True
        for reader in self._readers:
            reader.end()
        self._readers.clear()
