"""Invariants of a cache manager between two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ostinato.cache.holding import Holding
from ostinato.cache.panes import Panes
from ostinato.cache.store import CacheStore


def check_integrity(
    store: CacheStore, holdings: Mapping[str, Holding], slots_per_request: int, panes: Panes | None
) -> None:
    """Raise AssertionError unless references are exact and shared memory cannot be written.

    `holdings` has each request's blocks and slots by its id.
    """
    store.check_integrity()
    tables = Counter(id for holding in holdings.values() for id in holding.block_table)
    slots = Counter(id for holding in holdings.values() for id in holding.references())
    held = Counter(id for holding in holdings.values() for id in holding.pane_table[holding.first_pane :])
    for pool, holders in ((store.blocks, tables), (store.slots, slots), (store.panes, held)):
        assert holders[0] == 0, f"the null {pool.name} was handed out"
        for id in range(1, pool.count):
            assert holders[id] == pool.references(id), (
                f"{pool.name} {id} has {pool.references(id)} references and {holders[id]} holders"
            )
    pins = Counter(holding.tip for holding in holdings.values() if holding.tip is not None)
    for entry in store.index:
        assert entry.num_pins == pins[entry], "an entry has another number of pins than requests that stand there"
    if panes is not None:
        panes.check_integrity(tuple(holdings.values()))
    for request_id, holding in holdings.items():
        _check_holding(store, request_id, holding, slots_per_request)


def _check_holding(store: CacheStore, request_id: str, holding: Holding, slots_per_request: int) -> None:
    path = list(holding.entries())
    assert len(path) == holding.num_indexed, f"request {request_id} stands elsewhere in the index"
    blocks = store.blocks
    if blocks.count > 0:
        shared = tuple(entry.block for entry in reversed(path))
        assert holding.block_table[: len(path)] == shared, f"request {request_id} has blocks beside the index"
        for block in holding.block_table[len(path) :]:
            assert not blocks.is_kept(block), f"request {request_id} may write to block {block} of the index"
            assert blocks.references(block) == 1, f"block {block} has two writers"
    assert not any(holding.pane_table[: holding.first_pane]), f"request {request_id} has panes before its first"
    for index, id in enumerate(holding.pane_table[holding.first_pane :], start=holding.first_pane):
        if index < len(path):
            pane = path[-1 - index].pane
            assert (0 if pane is None else pane.id) == id, f"request {request_id} has panes beside the index"
            continue
        assert not store.panes.is_kept(id), f"request {request_id} may write to pane {id} of the index"
        assert store.panes.references(id) == 1, f"pane {id} has two writers"
    for slot in (*holding.slots, *holding.ahead, *(slot for _, slot in holding.reserved)):
        assert not store.slots.is_kept(slot), f"request {request_id} may write to slot {slot} of the index"
        assert store.slots.references(slot) == 1, f"slot {slot} has two writers"
    assert len(set(holding.slots)) == len(holding.slots), f"request {request_id} has a slot twice"
    lacks = slots_per_request - len(holding.slots)
    assert lacks >= 0, f"request {request_id} has {-lacks} slots too many"
    assert holding.slots or not lacks or holding.read_slot, f"request {request_id} has lost its state"
