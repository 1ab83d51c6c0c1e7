"""Files of the cache without a disk, over the fake runner's memory: they forget, break and refuse at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostinato.kv_cache.offload.file_tier import FileRates, FileTier
from ostinato.kv_cache.request_cache import CacheMemory, MemoryKind
from ostinato.observe.counts import FileCounts
from tests.support.fake_runner import FakeRunner

ROOT = bytes(16)
NUMBER = 8
"""Bytes of what stands for a block's or a slot's contents."""


Keys = dict[tuple[int, int], tuple[int, int, int]]


class FakeMemory:
    """Blocks, window blocks and slots of a fake runner; their bytes are the number of a copy."""

    def __init__(self, runner: FakeRunner, copies: list[Any] | None = None) -> None:
        """`copies`: those of other runners too, whose bytes this one can read; else those of this runner alone."""
        self._runner = runner
        if copies is not None:
            runner.copies = copies
        state = NUMBER if runner.has_state else 0
        self.sizes: Mapping[MemoryKind, int] = {
            "block": NUMBER if runner.has_attention else 0,
            "window_block": 0 if runner.window is None else NUMBER,
            "slot": state,
            "checkpoint": state,
        }

    def read(
        self, kind: MemoryKind, id: int, num_tokens: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        if kind in ("slot", "checkpoint"):
            return self._kept(self._runner.states[id], into)
        return self._read(self._keys(kind), id, num_tokens, into)

    def write(self, kind: MemoryKind, id: int, contents: memoryview) -> None:
        if kind in ("slot", "checkpoint"):
            self._runner.states[id] = self._copy(contents)
        else:
            self._write(self._keys(kind), id, contents)

    def _keys(self, kind: MemoryKind) -> Keys:
        return self._runner.keys if kind == "block" else self._runner.window_block_keys

    def _read(self, keys: Keys, id: int, num_tokens: int | None, into: memoryview | None) -> memoryview:
        size = self._runner.block_size if num_tokens is None else num_tokens
        return self._kept([keys[id, offset] for offset in range(size)], into)

    def _write(self, keys: Keys, id: int, contents: memoryview) -> None:
        for offset, key in enumerate(self._copy(contents)):
            keys[id, offset] = key

    def _kept(self, copy: Any, into: memoryview | None) -> memoryview:
        self._runner.copies.append(copy)
        found = memoryview(bytearray(NUMBER)) if into is None else into
        found[:] = (len(self._runner.copies) - 1).to_bytes(NUMBER, "little")
        return found

    def _copy(self, contents: memoryview) -> Any:
        return self._runner.copies[int.from_bytes(contents, "little")]


def note_writes(memory: CacheMemory, kind: MemoryKind, written: list[int]) -> None:
    """From now on, add the id of each block of a kind that is written to `written`."""
    real = memory.write

    def write(kind_written: MemoryKind, id: int, contents: memoryview) -> None:
        if kind_written == kind:
            written.append(id)
        real(kind_written, id, contents)

    memory.write = write  # type: ignore[method-assign]


class ForgetfulDirectory:
    """As `CacheDirectory`, in memory. One in so many writes is dropped, one in so many reads finds damage."""

    def __init__(self, seed: int = 0, one_in: int = 12) -> None:
        self.counts, self.limit = FileCounts(), 10**9
        self._chance = random.Random(seed)
        self._one_in = one_in
        self._kept: dict[tuple[str, bytes], tuple[tuple[int, ...], bytes]] = {}

    def has(self, kind: str, name: bytes) -> bool:
        return (kind, name) in self._kept

    def write(
        self, kind: str, name: bytes, token_ids: Sequence[int], size: int, copy: Callable[[memoryview], object]
    ) -> bool:
        if self.has(kind, name):
            return True
        if self._happens():
            self.counts.dropped += 1
            return False
        contents = bytearray(size)
        copy(memoryview(contents))
        self._kept[kind, name] = tuple(token_ids), bytes(contents)
        self.counts.written += 1
        return True

    def read(self, kind: str, name: bytes, token_ids: Sequence[int], size: int) -> memoryview | None:
        found = self._kept.get((kind, name))
        assert found is not None, "nobody asks for what is not there"
        if self._happens():
            del self._kept[kind, name]
            self.counts.damaged += 1
            return None
        assert found[0] == tuple(token_ids), "a name stands for other tokens"
        assert len(found[1]) == size, "a file has another size than it was written with"
        self.counts.read += 1
        return memoryview(found[1])

    def touch(self, kind: str, name: bytes) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def clear(self) -> None:
        self._kept.clear()

    def _happens(self) -> bool:
        return self._one_in > 0 and self._chance.randrange(self._one_in) == 0


def fake_tier(
    runner: FakeRunner, directory: ForgetfulDirectory | None = None, bytes_per_second: float = 1e12
) -> FileTier:
    """Files in which reading pays from the first token on, unless `bytes_per_second` says otherwise."""
    rates = FileRates(bytes_per_second, 1.0)
    return FileTier(directory or ForgetfulDirectory(one_in=0), FakeMemory(runner), ROOT, rates)  # type: ignore[arg-type]
