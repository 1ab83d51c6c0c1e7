"""Invariants of a cache manager between two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ostinato.cache.holding import RequestCache
from ostinato.cache.panes import WindowBlocks
from ostinato.cache.store import CacheStore


def check_cache_integrity(
    store: CacheStore, holdings: Mapping[str, RequestCache], slots_per_request: int, panes: WindowBlocks | None
) -> None:
    """Raise AssertionError unless references are exact and shared memory cannot be written.

    `holdings` has each request's blocks and slots by its id.
    """
    store.check_integrity()
    tables = Counter(id for holding in holdings.values() for id in holding.block_table)
    slots = Counter(id for holding in holdings.values() for id in holding.referenced_slots())
    held = Counter(id for holding in holdings.values() for id in holding.window_block_table[holding.first_window_block :])
    for pool, holders in ((store.blocks, tables), (store.slots, slots), (store.window_blocks, held)):
        assert holders[0] == 0, f"the null {pool.name} was handed out"
        for id in range(1, pool.count):
            assert holders[id] == pool.references(id), (
                f"{pool.name} {id} has {pool.references(id)} references and {holders[id]} holders"
            )
    pins = Counter(holding.last_entry for holding in holdings.values() if holding.last_entry is not None)
    for entry in store.index:
        assert entry.num_pins == pins[entry], "an entry has another number of pins than requests that stand there"
    if panes is not None:
        panes.check_integrity(tuple(holdings.values()))
    for request_id, holding in holdings.items():
        _check_holding(store, request_id, holding, slots_per_request)


def _check_holding(store: CacheStore, request_id: str, holding: RequestCache, slots_per_request: int) -> None:
    path = list(holding.entries())
    assert len(path) == holding.num_indexed, f"request {request_id} stands elsewhere in the index"
    blocks = store.blocks
    if blocks.count > 0:
        shared = tuple(entry.block for entry in reversed(path))
        assert holding.block_table[: len(path)] == shared, f"request {request_id} has blocks beside the index"
        for block in holding.block_table[len(path) :]:
            assert not blocks.is_cached(block), f"request {request_id} may write to block {block} of the index"
            assert blocks.references(block) == 1, f"block {block} has two writers"
    assert not any(holding.window_block_table[: holding.first_window_block]), f"request {request_id} has panes before its first"
    for index, id in enumerate(holding.window_block_table[holding.first_window_block :], start=holding.first_window_block):
        if index < len(path):
            pane = path[-1 - index].window_block
            assert (0 if pane is None else pane.id) == id, f"request {request_id} has panes beside the index"
            continue
        assert not store.window_blocks.is_cached(id), f"request {request_id} may write to pane {id} of the index"
        assert store.window_blocks.references(id) == 1, f"pane {id} has two writers"
    for slot in (*holding.write_slots, *holding.next_slots, *(slot for _, slot in holding.reserved_checkpoints)):
        assert not store.slots.is_cached(slot), f"request {request_id} may write to slot {slot} of the index"
        assert store.slots.references(slot) == 1, f"slot {slot} has two writers"
    assert len(set(holding.write_slots)) == len(holding.write_slots), f"request {request_id} has a slot twice"
    lacks = slots_per_request - len(holding.write_slots)
    assert lacks >= 0, f"request {request_id} has {-lacks} slots too many"
    assert holding.write_slots or not lacks or holding.read_slot, f"request {request_id} has lost its state"
