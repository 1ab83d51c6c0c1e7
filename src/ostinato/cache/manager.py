"""What each request holds of the cache: blocks for its tokens, and slots for its state."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from ostinato.cache.pool import Pool


@dataclass(slots=True)
class Holding:
    """The memory of one request.

    Entry i of `block_table` is for positions `i * block_size` to `(i + 1) * block_size - 1`. `slots` are what
    its steps write to, none in a model without state layers. It has blocks for `capacity` tokens.
    """

    block_table: tuple[int, ...]
    slots: tuple[int, ...]
    capacity: int


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks and slots held by requests, and how many there are to be held (the null ones do not count)."""

    blocks_used: int
    blocks_total: int
    slots_used: int
    slots_total: int


class CacheManager:
    """Gives requests their blocks and slots, and takes them back.

    `num_blocks` and `num_slots` are the planned counts and include the null block and the null slot; 0 blocks
    is a model without attention, 0 slots one without state layers, and then none are needed. A request holds
    the same `slots_per_request` slots from its first `grow` to its `release`.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_size: int, slots_per_request: int = 1) -> None:
        assert block_size > 0, f"a block cannot hold {block_size} tokens"
        assert slots_per_request > 0, f"a request cannot have {slots_per_request} slots"
        self.block_size = block_size
        self.blocks = Pool("block", num_blocks)
        self.slots = Pool("slot", num_slots)
        self._slots_per_request = slots_per_request if num_slots > 0 else 0
        self._holdings: dict[str, Holding] = {}

    def blocks_needed(self, num_tokens: int) -> int:
        """How many blocks hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size) if self.blocks.count > 0 else 0

    def max_tokens_ever(self) -> int:
        """The most tokens that a request can have when alone; `sys.maxsize` where nothing limits it."""
        if self._slots_per_request > self.slots.capacity:
            return 0
        return self.blocks.capacity * self.block_size if self.blocks.count > 0 else sys.maxsize

    def grow(self, request_id: str, num_tokens: int, spare_blocks: int = 0) -> bool:
        """Give the request blocks for its first `num_tokens` tokens, and its slots if it has none yet.

        Returns False, and changes nothing, if not enough are free. When blocks have to be taken,
        `spare_blocks` must stay free beyond them. The block table is extended at its end, and a row made
        earlier keeps the one it has. A call that needs no new block costs one look-up.
        """
        holding = self._holdings.get(request_id)
        if holding is not None and num_tokens <= holding.capacity:
            return True
        missing = self.blocks_needed(num_tokens) - (len(holding.block_table) if holding else 0)
        if missing > 0 and missing + spare_blocks > self.blocks.num_free:
            return False
        if holding is None:
            slots = self.slots.allocate(self._slots_per_request)
            if slots is None:
                return False
            holding = self._holdings[request_id] = Holding((), tuple(slots), 0)
        taken = self.blocks.allocate(missing)
        assert taken is not None, "the free blocks were counted above"
        holding.block_table += tuple(taken)
        holding.capacity = len(holding.block_table) * self.block_size if self.blocks.count > 0 else sys.maxsize
        return True

    def release(self, request_id: str) -> None:
        """Take back all that the request holds. No step may still be writing to it."""
        holding = self._holdings.pop(request_id)
        self.blocks.release(holding.block_table)
        self.slots.release(holding.slots)

    def holding(self, request_id: str) -> Holding:
        """What the request holds, for reading; only this class changes it."""
        return self._holdings[request_id]

    def holders(self) -> set[str]:
        """The ids of the requests that hold memory."""
        return set(self._holdings)

    def usage(self) -> CacheUsage:
        return CacheUsage(self.blocks.num_used, self.blocks.capacity, self.slots.num_used, self.slots.capacity)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block and slot in use is held by exactly one request, once."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        block_holders = Counter(id for holding in self._holdings.values() for id in holding.block_table)
        slot_holders = Counter(id for holding in self._holdings.values() for id in holding.slots)
        for pool, holders in ((self.blocks, block_holders), (self.slots, slot_holders)):
            for id in range(1, pool.count):
                assert holders[id] <= 1, f"{pool.name} {id} has {holders[id]} writers"
                assert holders[id] == pool.references(id), (
                    f"{pool.name} {id} has {pool.references(id)} references and {holders[id]} holders"
                )
            assert holders[0] == 0, f"the null {pool.name} was handed out"
        for request_id, holding in self._holdings.items():
            assert len(holding.slots) == self._slots_per_request, f"request {request_id} has {len(holding.slots)} slots"
