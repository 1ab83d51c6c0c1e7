"""Packed checkpoints: states at block boundaries that left their slots, in 8 bits, without loss.

With `ssm_checkpoint_dtype="int8"` the kernels round a state at each block boundary to what 8 bits hold, so packing and
unpacking change no bit of a checkpoint. Slots are for running requests and for the checkpoints taken last. A checkpoint
whose slot is needed is packed here, and a request that hits it gets a slot of its own with the unpacked state.
"""

from __future__ import annotations

import mmap

from ostinato.kv_cache.request_cache import CacheMemory


class PackedStates:
    """Memory of `count` packed checkpoints, by their ids, which the store's pool `packed` allocates."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._packed: memoryview | None = None

    def pack(self, memory: CacheMemory, slot: int, id: int) -> None:
        """Copy the state of `slot` to place `id`."""
        if self._packed is None:
            # The operating system backs a page when it is first used.
            self._packed = memoryview(mmap.mmap(-1, self._count * memory.checkpoint_bytes))
        memory.read_checkpoint(slot, into=self.contents(memory, id))

    def unpack(self, memory: CacheMemory, id: int, slot: int) -> None:
        """Copy the state of place `id` to `slot`, which no step reads or writes meanwhile."""
        memory.write_checkpoint(slot, self.contents(memory, id))

    def contents(self, memory: CacheMemory, id: int) -> memoryview:
        """Return the bytes of place `id`, which are the checkpoint's as long as it is there."""
        assert self._packed is not None, f"nothing was packed, so place {id} is empty"
        return self._packed[id * memory.checkpoint_bytes : (id + 1) * memory.checkpoint_bytes]
