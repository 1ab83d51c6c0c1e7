"""Pools hand out ids, and the cache manager hands them to requests."""

from __future__ import annotations

import pytest

from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.store import IdPool


def test_a_new_pool_hands_out_every_id_but_the_null_one_lowest_first() -> None:
    pool = IdPool("block", 5)
    assert (pool.capacity, pool.num_free) == (4, 4)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_an_allocation_that_cannot_be_met_takes_nothing() -> None:
    pool = IdPool("block", 4)
    assert pool.allocate(4) is None
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [3]
    pool.check_integrity()


@pytest.mark.parametrize("count", [0, 1])
def test_a_pool_of_nothing_gives_nothing_and_needs_nothing(count: int) -> None:
    pool = IdPool("slot", count)
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    assert pool.capacity == 0
    pool.check_integrity()


def test_what_was_released_last_is_handed_out_first_in_the_same_order() -> None:
    pool = IdPool("block", 10)
    first, second = pool.allocate(3), pool.allocate(3)
    assert first is not None
    assert second is not None
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == [1, 2, 3, 4, 5, 6]


def test_a_shared_id_is_free_only_when_its_last_reference_is_released() -> None:
    pool = IdPool("block", 4)
    pool.allocate(2)
    pool.retain([1])
    pool.release([1, 2])
    assert pool.references(1) == 1
    assert pool.num_free == 2
    pool.check_integrity()
    pool.release([1])
    assert pool.num_free == 3
    pool.check_integrity()


def test_an_id_that_the_index_keeps_stays_when_its_last_reference_goes_and_can_be_referenced_again() -> None:
    pool = IdPool("block", 4)
    pool.allocate(2)
    pool.mark_cached(1)
    assert (pool.num_used, pool.num_idle, pool.num_free) == (2, 0, 1)
    pool.release([1, 2])
    assert (pool.num_used, pool.num_idle, pool.num_free, pool.num_available) == (0, 1, 2, 3)
    assert pool.is_idle(1)
    assert pool.allocate(3) is None
    pool.retain([1])
    assert (pool.num_used, pool.num_idle, pool.num_available) == (1, 0, 2)
    assert not pool.is_idle(1)
    pool.check_integrity()


def test_an_id_that_the_index_drops_is_free_at_once_unless_it_is_referenced() -> None:
    pool = IdPool("block", 4)
    pool.allocate(2)
    for id in (1, 2):
        pool.mark_cached(id)
    pool.release([1])
    pool.unmark_cached(1)
    pool.unmark_cached(2)
    assert (pool.num_used, pool.num_idle, pool.num_free) == (1, 0, 2)
    pool.check_integrity()
    pool.release([2])
    assert pool.num_free == 3
    pool.check_integrity()


def test_keeping_what_is_not_referenced_or_kept_already_and_dropping_what_is_not_kept_is_an_error() -> None:
    pool = IdPool("slot", 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="slot 2 is not in use"):
        pool.mark_cached(2)
    pool.mark_cached(1)
    with pytest.raises(AssertionError, match="slot 1 is in the index already"):
        pool.mark_cached(1)
    with pytest.raises(AssertionError, match="slot 3 is not in the index"):
        pool.unmark_cached(3)
    pool.release([1])
    with pytest.raises(AssertionError, match="slot 1 is not in use"):
        pool.release([1])
    pool.check_integrity()


@pytest.mark.parametrize("id", [0, 2, 7, -1])
def test_handing_back_or_sharing_what_is_not_in_use_is_an_error(id: int) -> None:
    pool = IdPool("block", 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=f"block {id} is not"):
        pool.release([id])
    with pytest.raises(AssertionError, match=f"block {id} is not"):
        pool.retain([id])
    pool.check_integrity()


def test_the_check_finds_an_id_that_leaked_is_free_twice_or_is_free_and_referenced() -> None:
    leaked, twice, both, null, kept, counted = (IdPool("block", 4) for _ in range(6))
    leaked._free.remove(2)
    twice._free.append(2)
    both._references[2] = 1
    null._free.append(0)
    kept._cached[0] = 1
    counted._num_idle = 1
    cases = ((leaked, "leaked"), (twice, "twice"), (both, "both free"), (null, "null block"))
    for pool, message in (*cases, (kept, "null block is in the index"), (counted, "1 were counted")):
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity()


def test_a_request_keeps_its_blocks_and_its_slot_while_it_grows() -> None:
    cache = CacheManager(num_blocks=10, num_slots=3, block_size=4)
    assert cache.admit("a", 5)
    before = cache.request_cache("a").block_table
    slots = cache.request_cache("a").write_slots
    assert len(before) == 2
    assert len(slots) == 1
    assert cache.grow("a", 8)
    assert cache.request_cache("a").block_table == before
    assert cache.grow("a", 9)
    assert cache.request_cache("a").block_table[:2] == before
    assert len(cache.request_cache("a").block_table) == 3
    assert cache.request_cache("a").write_slots == slots
    cache.check_integrity()


def test_a_request_that_finds_too_few_blocks_or_no_slot_takes_neither() -> None:
    cache = CacheManager(num_blocks=4, num_slots=2, block_size=4)
    assert not cache.admit("a", 13)
    assert cache.usage().slots_used == 0
    assert cache.admit("a", 4)
    assert not cache.grow("a", 13)
    assert len(cache.request_cache("a").block_table) == 1
    assert not cache.admit("b", 1)
    assert cache.usage().blocks_used == 1
    assert cache.request_ids() == {"a"}
    cache.check_integrity()


def test_spare_blocks_stay_free_when_blocks_are_taken_and_do_not_matter_when_none_is() -> None:
    cache = CacheManager(num_blocks=4, num_slots=0, block_size=4)
    assert not cache.admit("a", 8, spare_blocks=2)
    assert cache.admit("a", 8, spare_blocks=1)
    assert cache.grow("a", 7, spare_blocks=99)


def test_released_memory_serves_the_next_request() -> None:
    cache = CacheManager(num_blocks=4, num_slots=2, block_size=4)
    assert cache.admit("a", 12)
    cache.free("a")
    usage = cache.usage()
    assert (usage.blocks_used, usage.blocks_total, usage.slots_used, usage.slots_total) == (0, 3, 0, 1)
    assert cache.admit("b", 12)
    cache.check_integrity()


def test_a_model_without_attention_needs_no_blocks() -> None:
    cache = CacheManager(num_blocks=0, num_slots=2, block_size=16)
    assert cache.blocks_needed(10**9) == 0
    assert cache.admit("a", 10**9)
    assert cache.request_cache("a").block_table == ()
    assert cache.max_request_tokens() >= 10**9
    cache.check_integrity()


def test_a_model_without_state_layers_needs_no_slots() -> None:
    cache = CacheManager(num_blocks=3, num_slots=0, block_size=16)
    assert cache.admit("a", 16)
    assert cache.admit("b", 16)
    assert cache.request_cache("a").write_slots == ()
    assert cache.max_request_tokens() == 32
    cache.check_integrity()


def test_nothing_ever_fits_where_there_are_fewer_slots_than_one_request_needs() -> None:
    assert CacheManager(num_blocks=9, num_slots=2, block_size=4, slots_per_request=2).max_request_tokens() == 0
    assert CacheManager(num_blocks=9, num_slots=3, block_size=4, slots_per_request=2).max_request_tokens() == 32


def test_each_request_holds_as_many_slots_as_a_step_of_it_writes() -> None:
    cache = CacheManager(num_blocks=9, num_slots=6, block_size=4, slots_per_request=2)
    assert cache.admit("a", 1)
    assert cache.admit("b", 1)
    assert not cache.admit("c", 1)
    assert len({*cache.request_cache("a").write_slots, *cache.request_cache("b").write_slots}) == 4
    cache.check_integrity()


def test_the_check_finds_a_block_with_two_writers_and_one_that_nobody_holds() -> None:
    shared = CacheManager(num_blocks=9, num_slots=3, block_size=4)
    shared.admit("a", 4)
    shared.admit("b", 4)
    shared.request_cache("b").block_table = shared.request_cache("a").block_table
    with pytest.raises(AssertionError, match="1 references and 2 holders"):
        shared.check_integrity()
    lost = CacheManager(num_blocks=9, num_slots=3, block_size=4)
    lost.admit("a", 8)
    lost.request_cache("a").block_table = lost.request_cache("a").block_table[:1]
    with pytest.raises(AssertionError, match="1 references and 0 holders"):
        lost.check_integrity()
