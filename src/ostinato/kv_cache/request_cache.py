"""Blocks and slots of one request, usage of the cache by all of them, and their memory as bytes.

A KV snapshot is the memory of one request, on its way from one engine to another. Packed states are checkpoints that
left their slots: with `ssm_checkpoint_dtype="int8"` the kernels round a state at each block boundary to what 8 bits
hold, so packing and unpacking change no bit of it. Slots are for running requests and for the checkpoints taken last.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ostinato.kv_cache.prefix_index import Checkpoint, IndexEntry


@dataclass(slots=True)
class RequestCache:
    """The memory of one request.

    Entry i of `block_table` is for positions `i * block_size` to `(i + 1) * block_size - 1`; it has blocks for
    `capacity` tokens. The first `num_indexed` of them are in the index, the last one as `last_entry`, and may be other
    requests' too: they are only read.
    """

    block_table: tuple[int, ...] = ()
    capacity: int = 0
    window_block_table: tuple[int, ...] = ()
    """Window blocks, indexed as `block_table`; 0 for those already freed, which precede `first_window_block`."""
    first_window_block: int = 0
    num_reserved_blocks: int = 0
    """Blocks of tokens for which window blocks are reserved."""
    write_slots: tuple[int, ...] = ()
    """Slots that only this request holds and its steps write to: `slots_per_request` of them when a batch row is made.
    """
    read_slot: int = 0
    """The slot that the next step reads its state from: one of `write_slots`, a checkpoint, or 0 for the zero state."""
    reserved_checkpoints: tuple[tuple[int, int], ...] = ()
    """(position, slot): checkpoints that the step in flight writes out within its tokens."""
    next_slots: tuple[int, ...] = ()
    """The slot that the next step writes to, if it differs from the slot of the step in flight."""
    next_step_overwrites: bool = False
    """True if the next step overwrites the in-flight step's final state."""
    last_entry: IndexEntry | None = None
    num_indexed: int = 0
    rolling_checkpoint: Checkpoint | None = None
    """The checkpoint at the last block boundary that decoding passed."""
    replaced_checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints before `rolling_checkpoint`, while the output may still turn out to end before it."""

    def entries(self) -> Iterator[IndexEntry]:
        """Yield its indexed blocks, the last one first."""
        entry = self.last_entry
        while entry is not None:
            yield entry
            entry = entry.parent


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks, slots and window blocks held by requests, held by the index alone, and in all, without the null ones."""

    blocks_used: int
    blocks_cached: int
    blocks_total: int
    slots_used: int
    slots_cached: int
    slots_total: int
    window_blocks_used: int = 0
    window_blocks_cached: int = 0
    window_blocks_total: int = 0


MemoryKind = Literal["block", "window_block", "slot", "checkpoint"]
"""Kind of memory that an id is of; a checkpoint is a slot at a block boundary, packed if the plan packs states."""


class CacheMemory(Protocol):
    """The memory of blocks, window blocks and slots, whose ids the pools allocate."""

    sizes: Mapping[MemoryKind, int]
    """Bytes of one of each kind."""

    def read(
        self, kind: MemoryKind, id: int, num_tokens: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Return a copy of all bytes, or fill `into` with as many.

        With `num_tokens`, only the first tokens of a block or window block are read, with zeros behind them.
        """

    def write(self, kind: MemoryKind, id: int, contents: memoryview) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class KVSnapshot:
    """KV snapshot from another engine: the first `num_tokens` tokens of a request, computed."""

    num_tokens: int
    blocks: tuple[memoryview, ...]
    """Blocks of those tokens, in order; none in a model without attention, or with windows in all layers."""
    window_blocks: tuple[memoryview, ...]
    """Window blocks of the last of those tokens, from `SlidingWindowSpec.first_block` on; none without windows."""
    state: memoryview | None
    """State after the last of them; None in a model without state layers."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, (*self.blocks, *self.window_blocks))) + (0 if self.state is None else len(self.state))


class PackedStates:
    """Memory of `count` packed checkpoints, by their ids, which the store's pool `packed` allocates."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._packed: memoryview | None = None

    def pack(self, memory: CacheMemory, slot: int, id: int) -> None:
        """Copy the state of `slot` to place `id`."""
        if self._packed is None:
            # The operating system backs a page when it is first used.
            self._packed = memoryview(mmap.mmap(-1, self._count * memory.sizes["checkpoint"]))
        memory.read("checkpoint", slot, into=self.contents(memory, id))

    def unpack(self, memory: CacheMemory, id: int, slot: int) -> None:
        """Copy the state of place `id` to `slot`, which no step reads or writes meanwhile."""
        memory.write("checkpoint", slot, self.contents(memory, id))

    def contents(self, memory: CacheMemory, id: int) -> memoryview:
        """Return the bytes of place `id`, which are the checkpoint's as long as it is there."""
        assert self._packed is not None, f"nothing was packed, so place {id} is empty"
        size = memory.sizes["checkpoint"]
        return self._packed[id * size : (id + 1) * size]
