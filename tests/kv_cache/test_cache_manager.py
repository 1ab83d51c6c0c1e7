"""Slots on their way: from a request to the index and back, in place where none is left, and in the right hands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato.kv_cache.checkpoints import CheckpointPositions, PrefixCachePolicy, plan_checkpoints
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.prefix_index import BlockHashes
from tests.support.fake_runner import continuation
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    make_request,
    report_of,
    request_of,
    run_all,
    runner_for,
    serve,
    step,
    text,
)

B = BLOCK
ALL = PrefixCachePolicy(True, "all", 2 * B)


def chain_of(tokens: tuple[int, ...]) -> BlockHashes:
    block_hashes = BlockHashes(B)
    block_hashes.extend(lambda start, end: tokens[start:end], len(tokens))
    return block_hashes


def placement_of(num_tokens: int, policy: PrefixCachePolicy = ALL, num_evictable: int = 40) -> CheckpointPositions:
    return plan_checkpoints(policy, B, num_tokens, 0, 0, num_evictable)


def compute(cache: CacheManager, name: str, tokens: tuple[int, ...], samples: bool = False) -> None:
    """A step of the request succeeded, which computed its text up to here."""
    cache.accept_state(name)
    cache.commit(name, chain_of(tokens), len(tokens), placement_of(len(tokens) + (not samples)), samples)
    cache.check_integrity()


# Checkpoints are taken without a copy


def test_a_state_that_becomes_a_checkpoint_stays_where_it_is_and_the_next_step_writes_elsewhere() -> None:
    cache = CacheManager(20, 20, B)
    assert cache.admit("a", 9)
    (slot,) = cache.request_cache("a").write_slots
    compute(cache, "a", text(8))
    request_cache = cache.request_cache("a")
    assert (request_cache.write_slots, request_cache.read_slot) == ((), slot)
    assert cache.store.index.checkpoint_of(slot) is not None
    assert cache.allocate_write_slots("a")
    assert cache.request_cache("a").write_slots != (slot,)
    assert not cache.slots.is_idle(slot)
    cache.accept_state("a")
    assert cache.slots.is_idle(slot)
    assert cache.request_cache("a").read_slot == cache.request_cache("a").write_slots[0]
    cache.check_integrity()


def test_a_checkpoint_that_is_hit_is_referenced_from_admission_until_the_step_that_reads_it_is_over() -> None:
    cache = CacheManager(20, 4, B)
    cache.admit("a", 9)
    compute(cache, "a", text(8))
    cache.free("a")
    (checkpoint,) = cache.store.index.checkpoints
    match = cache.store.match(chain_of(text(9)), 8)
    assert cache.admit("b", 9, match)
    assert (cache.request_cache("b").read_slot, checkpoint.hits) == (checkpoint.slot, 1)
    # All other slots are taken, and this one is not.
    assert cache.admit("c", 1)
    assert not cache.admit("d", 1)
    assert cache.store.index.checkpoint_of(checkpoint.slot) is checkpoint
    cache.accept_state("b")
    assert cache.admit("d", 1)
    assert cache.store.index.checkpoint_of(checkpoint.slot) is None
    cache.check_integrity()


def test_a_request_that_is_not_admitted_leaves_no_trace() -> None:
    cache = CacheManager(6, 4, B)
    cache.admit("a", 9)
    compute(cache, "a", text(8))
    cache.free("a")
    match = cache.store.match(chain_of(text(9)), 8)
    before = (cache.usage(), cache.store.now, [(each.hits, each.last_use) for each in cache.store.index.checkpoints])
    assert not cache.admit("b", 25, match)
    assert not cache.admit("b", 9, match, spare_blocks=3)
    assert before == (
        cache.usage(),
        cache.store.now,
        [(each.hits, each.last_use) for each in cache.store.index.checkpoints],
    )
    assert cache.request_ids() == set()
    cache.check_integrity()


def test_a_request_that_lacks_slots_is_not_admitted_and_nothing_is_evicted_for_it() -> None:
    cache = CacheManager(40, 8, B, slots_per_request=3)
    for seed in (1, 2):
        cache.admit("a", 9)
        compute(cache, "a", text(8, seed))
        cache.free("a")
    assert cache.admit("a", 9)
    assert cache.admit("b", 1)
    # One slot is left, and the one that it would read.
    match = cache.store.match(chain_of(text(9, 2)), 8)
    before = (cache.usage(), [each.entry.end for each in cache.store.index.checkpoints])
    counters = replace(cache.store.counters)
    assert (match.hit, len(before[1])) == (8, 1)
    assert not cache.admit("c", 9, match)
    assert not cache.admit("c", 9)
    assert before == (cache.usage(), [each.entry.end for each in cache.store.index.checkpoints])
    assert cache.store.counters == counters
    cache.check_integrity()


def test_what_is_hit_is_not_evicted_for_the_blocks_of_the_same_request() -> None:
    cache = CacheManager(6, 4, B)
    for seed in (1, 2):
        cache.admit("a", 8)
        compute(cache, "a", text(8, seed))
        cache.free("a")
    # The first text is the older one, and the fifth block has to come from somewhere.
    match = cache.store.match(chain_of(text(8, 1)), 8)
    assert cache.admit("b", 16, match)
    assert len(cache.store.match(chain_of(text(8, 1)), 8).path) == 2
    assert cache.store.counters.evicted_blocks == 1
    cache.check_integrity()


def test_the_blocks_of_running_requests_and_of_their_beginnings_are_not_evicted() -> None:
    cache = CacheManager(6, 0, B)
    cache.admit("a", 9)
    compute(cache, "a", text(8))
    assert cache.blocks.num_available == 2
    assert not cache.admit("b", 9)
    assert cache.admit("b", 8)
    assert len(cache.store.index) == 2
    cache.check_integrity()


def test_the_text_whose_request_ended_first_is_evicted_first_though_it_was_admitted_and_computed_last() -> None:
    cache = CacheManager(20, 0, B, eviction="lru")
    for name, seed in (("a", 1), ("b", 2)):
        cache.admit(name, 5)
        compute(cache, name, text(4, seed))
    cache.free("b")
    cache.free("a")
    cache.store.allocate_blocks(cache.blocks.num_free + 1)
    assert [len(cache.store.match(chain_of(text(4, seed)), 4).path) for seed in (1, 2)] == [1, 0]


# Where no slot is left


def test_with_one_slot_in_all_the_state_is_advanced_in_place_and_the_checkpoint_on_it_is_lost() -> None:
    scheduler = make_caching_scheduler(num_slots=2, spacing=B)
    runner = runner_for(scheduler)
    request = serve(scheduler, runner, text(6), max_tokens=12)
    assert request.output_token_ids == continuation(text(6), 12)
    counters = scheduler.cache.store.counters
    # After 8, 12 and 16 tokens; nobody could write out the one after 4.
    assert counters.checkpoints_taken == 3
    assert counters.evicted_checkpoints == 3
    assert counters.checkpoints_not_taken == 4
    assert report_of(serve(scheduler, runner, text(6)))[0] == 0


def test_a_hit_on_the_only_slot_is_taken_over_in_place() -> None:
    scheduler = make_caching_scheduler("align", num_slots=2)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(8), max_tokens=1)
    (checkpoint,) = scheduler.cache.store.index.checkpoints
    assert checkpoint.entry.end == 8
    request = request_of("b", text(10))
    scheduler.add(request)
    batch = scheduler.schedule()
    assert (batch.rows[0].start, batch.rows[0].read_slot, batch.rows[0].write_slots) == (8, 1, (1,))
    assert list(scheduler.cache.store.index.checkpoints) == []
    scheduler.check_integrity()
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(text(10), 5)


def test_a_checkpoint_that_two_requests_read_is_not_taken_over_and_one_of_them_waits_a_step() -> None:
    cache = CacheManager(20, 3, B)
    cache.admit("a", 9)
    compute(cache, "a", text(8), samples=True)
    match = cache.store.match(chain_of(text(9)), 8)
    assert cache.admit("b", 9, match)
    assert cache.request_cache("a").read_slot == cache.request_cache("b").read_slot
    assert not cache.allocate_write_slots("a")
    cache.check_integrity()
    assert len(list(cache.store.index.checkpoints)) == 1
    cache.accept_state("b")
    assert cache.allocate_write_slots("a")
    assert cache.request_cache("a").write_slots == (cache.request_cache("a").read_slot,)
    assert list(cache.store.index.checkpoints) == []
    cache.check_integrity()


@pytest.mark.parametrize("samples", [False, True])
def test_a_checkpoint_that_its_own_request_takes_over_counts_as_not_taken_and_one_that_was_hit_does_not(
    samples: bool,
) -> None:
    cache = CacheManager(20, 2, B)
    cache.admit("a", 9)
    compute(cache, "a", text(8), samples)
    counters = cache.store.counters
    cache.free("a")
    assert (counters.checkpoints_taken, counters.checkpoints_not_taken) == (1, 0)
    match = cache.store.match(chain_of(text(9)), 8)
    assert (match.hit, cache.admit("b", 20, match)) == (8, True)
    assert (counters.evicted_checkpoints, counters.checkpoints_not_taken) == (1, 0)
    compute(cache, "b", text(16), samples)
    assert cache.allocate_write_slots("b")
    assert (counters.evicted_checkpoints, counters.checkpoints_not_taken) == (2, 1)


def test_spare_slots_are_left_by_taking_the_checkpoint_over_though_a_slot_is_free() -> None:
    for spare_slots, kept in ((0, 1), (1, 0)):
        cache = CacheManager(20, 3, B)
        cache.admit("a", 9)
        compute(cache, "a", text(8), samples=True)
        assert cache.allocate_write_slots("a", spare_slots)
        assert len(list(cache.store.index.checkpoints)) == kept
        assert cache.store.counters.checkpoints_not_taken == 1 - kept
        assert cache.slots.num_available == 1 - kept
        cache.check_integrity()


def test_a_waiting_request_gets_the_slot_that_a_checkpoint_would_have_cost() -> None:
    scheduler = make_caching_scheduler(num_slots=3, spacing=100)
    runner = runner_for(scheduler)
    first = make_request("a", 3, max_tokens=20)
    scheduler.add(first)
    while first.num_computed_tokens != 8:
        step(scheduler, runner)
    scheduler.add(make_request("b", 3))
    assert [name for name, _, _ in step(scheduler, runner)] == ["a", "b"]
    run_all(scheduler, runner)
    assert first.output_token_ids == continuation(first.prompt_token_ids, 20)


def test_checkpoints_inside_a_chunk_are_taken_as_far_as_slots_are_available_and_the_rest_is_counted() -> None:
    cache = CacheManager(20, 4, B)
    cache.admit("a", 20)
    cache.reserve_checkpoints("a", [4, 8, 12])
    assert [position for position, _ in cache.request_cache("a").reserved_checkpoints] == [4, 8]
    assert cache.store.counters.checkpoints_not_taken == 1
    cache.free("a")
    cache.admit("b", 20)
    cache.reserve_checkpoints("b", [4, 8, 12], spare_slots=1)
    assert [position for position, _ in cache.request_cache("b").reserved_checkpoints] == [4]
    cache.check_integrity()
    cache.free("b")
    assert cache.slots.num_free == 3


# Trailing checkpoints


def trailing_of(mode: str, spacing: int, prompt: int, max_tokens: int) -> set[int]:
    """Where checkpoints stand after a request has been decoded."""
    scheduler = make_caching_scheduler(mode, spacing=spacing)
    serve(scheduler, runner_for(scheduler), text(prompt), max_tokens)
    return {each.entry.end for each in scheduler.cache.store.index.checkpoints}


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize(("max_tokens", "ends"), [(1, {4}), (3, {4, 8}), (6, {4, 8}), (7, {4, 12}), (30, {4, 32})])
def test_the_trailing_checkpoint_moves_on_and_the_prompts_last_one_stays(
    mode: str, max_tokens: int, ends: set[int]
) -> None:
    assert trailing_of(mode, 100, prompt=6, max_tokens=max_tokens) == ends


def test_in_mode_all_the_trailing_checkpoint_stays_behind_at_multiples_and_in_align_it_does_not() -> None:
    assert trailing_of("all", 8, prompt=6, max_tokens=30) == {4, 8, 16, 24, 32}
    assert trailing_of("align", 8, prompt=6, max_tokens=30) == {4, 32}


def test_a_trailing_checkpoint_that_was_hit_stays_where_it_is() -> None:
    scheduler = make_caching_scheduler(spacing=100)
    runner = runner_for(scheduler)
    first = make_request("a", 6, max_tokens=30)
    scheduler.add(first)
    while first.num_computed_tokens != 13:
        step(scheduler, runner)
    second = request_of("b", (*first.tokens(0, 13), 1))
    scheduler.add(second)
    run_all(scheduler, runner)
    assert report_of(second)[0] == 12
    assert {each.entry.end for each in scheduler.cache.store.index.checkpoints} == {4, 12, 16, 32}


def test_a_running_request_costs_no_more_than_one_slot_beside_its_own() -> None:
    scheduler = make_caching_scheduler(spacing=100)
    runner = runner_for(scheduler)
    request = make_request("a", 3, max_tokens=60)
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler, runner)
        usage = scheduler.cache.usage()
        assert usage.slots_used + usage.slots_cached <= 2


# Duplicates


def test_a_second_checkpoint_at_one_position_is_not_taken_and_its_slot_stays_with_its_request() -> None:
    cache = CacheManager(20, 20, B)
    for name in "ab":
        cache.admit(name, 9)
    slots = [cache.request_cache(name).write_slots for name in "ab"]
    for name in "ab":
        compute(cache, name, text(8))
    assert (cache.request_cache("a").write_slots, cache.request_cache("b").write_slots) == ((), slots[1])
    assert cache.request_cache("b").read_slot == slots[1][0]
    assert cache.store.counters.checkpoints_taken == 1
    assert cache.request_cache("a").block_table[:2] == cache.request_cache("b").block_table[:2]
    assert cache.store.counters.shared_blocks == 2


def test_a_block_that_was_given_up_for_an_equal_one_is_free() -> None:
    cache = CacheManager(20, 0, B)
    for name in "ab":
        cache.admit(name, 9)
    free = cache.blocks.num_free
    for name in "ab":
        compute(cache, name, text(9))
    assert cache.blocks.num_free == free + 2
    tables = [cache.request_cache(name).block_table for name in "ab"]
    assert tables[0][2] != tables[1][2]


def test_a_row_made_before_a_block_was_swapped_keeps_its_table() -> None:
    cache = CacheManager(20, 0, B)
    for name in "ab":
        cache.admit(name, 9)
    table = cache.request_cache("b").block_table
    before = tuple(table)
    for name in "ab":
        compute(cache, name, text(9))
    assert table == before
    assert cache.request_cache("b").block_table != before


# The check


def test_the_check_finds_a_pin_that_was_lost_a_slot_of_the_index_to_be_written_and_a_lost_checkpoint() -> None:
    def sound() -> CacheManager:
        cache = CacheManager(20, 20, B)
        cache.admit("a", 12)
        compute(cache, "a", text(8))
        cache.allocate_write_slots("a")
        return cache

    cache = sound()
    tip = cache.request_cache("a").last_entry
    assert tip is not None
    tip.num_holders = 0
    with pytest.raises(AssertionError, match="number of holders"):
        cache.check_integrity()
    cache = sound()
    cache.slots.mark_cached(cache.request_cache("a").write_slots[0])
    with pytest.raises(AssertionError, match="the index has other slots"):
        cache.check_integrity()
    cache = sound()
    next(iter(cache.store.index.checkpoints)).entry.checkpoint = None
    with pytest.raises(AssertionError, match="outlived its entry"):
        cache.check_integrity()
    cache = sound()
    cache.request_cache("a").num_indexed = 1
    with pytest.raises(AssertionError, match="stands elsewhere"):
        cache.check_integrity()
