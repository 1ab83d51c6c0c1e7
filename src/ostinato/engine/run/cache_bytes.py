"""The memory of blocks and slots as bytes: what files of the cache hold, and what moves from one engine to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ostinato.cache.memory import CacheMemory
from ostinato.ops.step import LayerMemory


def bytes_of(memory: Sequence[LayerMemory], block_size: int) -> CacheMemory:
    """Of memory on a CPU or on a GPU."""
    is_on_host = all(part.device.type == "cpu" for part in [*_of_blocks(memory), *_of_slots(memory)])
    return (CacheBytes if is_on_host else DeviceCacheBytes)(memory, block_size)


class CacheBytes:
    """Copies a block or a slot, of all layers one behind the other, out of their memory and into it (`CacheMemory`).

    numpy copies, on the calling thread alone: torch shares a copy out among its threads, which wait for each other
    longer than the copy takes where a processor has other things to do.
    """

    def __init__(self, memory: Sequence[LayerMemory], block_size: int) -> None:
        """`block_size`: tokens of a block, each of which has as many bytes in each part of it."""
        self._blocks, self._slots = ([_rows(part).numpy() for part in of(memory)] for of in (_of_blocks, _of_slots))
        self.block_bytes, self.slot_bytes = (_bytes_of_one(parts) for parts in (self._blocks, self._slots))
        self._block_size = block_size

    def read_block(self, block: int, num_tokens: int | None = None) -> memoryview:
        found = _read(self._blocks, block)
        if num_tokens is not None:
            _clear(found, [part.shape[1] for part in self._blocks], self._block_size, num_tokens)
        return found.data

    def write_block(self, block: int, contents: memoryview) -> None:
        _write(self._blocks, block, contents)

    def read_slot(self, slot: int) -> memoryview:
        return _read(self._slots, slot).data

    def write_slot(self, slot: int, contents: memoryview) -> None:
        _write(self._slots, slot, contents)


class DeviceCacheBytes:
    """The same for memory on a GPU. What is written is there when the call returns, whatever stream reads it."""

    def __init__(self, memory: Sequence[LayerMemory], block_size: int) -> None:
        self._blocks, self._slots = ([_rows(part) for part in of(memory)] for of in (_of_blocks, _of_slots))
        self.block_bytes, self.slot_bytes = (_bytes_of_one(parts) for parts in (self._blocks, self._slots))
        self._block_size = block_size

    def read_block(self, block: int, num_tokens: int | None = None) -> memoryview:
        found = _fetch(self._blocks, block)
        if num_tokens is not None:
            _clear(found, [part.shape[1] for part in self._blocks], self._block_size, num_tokens)
        return found.data

    def write_block(self, block: int, contents: memoryview) -> None:
        _send(self._blocks, block, contents)

    def read_slot(self, slot: int) -> memoryview:
        return _fetch(self._slots, slot).data

    def write_slot(self, slot: int, contents: memoryview) -> None:
        _send(self._slots, slot, contents)


def _of_blocks(memory: Sequence[LayerMemory]) -> list[torch.Tensor]:
    return [part for each in memory for part in each.in_blocks.values()]


def _of_slots(memory: Sequence[LayerMemory]) -> list[torch.Tensor]:
    return [part for each in memory for part in each.states.values()]


def _rows(part: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes. [blocks or slots, ...] -> [blocks or slots, bytes of one]"""
    return part.detach().view(len(part), -1).view(torch.uint8)


def _bytes_of_one(parts: Iterable[np.ndarray | torch.Tensor]) -> int:
    return sum(part.shape[1] for part in parts)


def _clear(contents: np.ndarray, sizes: Iterable[int], block_size: int, num_tokens: int) -> None:
    """Zeros behind the first `num_tokens` tokens of a block, of whose parts these are the bytes: what stood there may
    be another request's."""
    end = 0
    for size in sizes:
        start, end = end, end + size
        contents[start + size // block_size * num_tokens : end] = 0


def _read(parts: Sequence[np.ndarray], index: int) -> np.ndarray:
    return np.concatenate([part[index] for part in parts])


def _write(parts: Sequence[np.ndarray], index: int, contents: memoryview) -> None:
    given = np.frombuffer(contents, np.uint8)
    start = 0
    for part in parts:
        part[index] = given[start : start + part.shape[1]]
        start += part.shape[1]


def _fetch(parts: Sequence[torch.Tensor], index: int) -> np.ndarray:
    found: np.ndarray = torch.cat([part[index] for part in parts]).cpu().numpy()
    return found


def _send(parts: Sequence[torch.Tensor], index: int, contents: memoryview) -> None:
    given = torch.from_numpy(np.array(np.frombuffer(contents, np.uint8)))
    for part, own in zip(parts, given.split([part.shape[1] for part in parts]), strict=True):
        part[index].copy_(own)
    if parts and parts[0].device.type == "cuda":
        torch.cuda.synchronize(parts[0].device)
