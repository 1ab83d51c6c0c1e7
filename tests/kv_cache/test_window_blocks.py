"""Window blocks: what requests keep of layers with a window, what the index does, and hits where some of it is gone."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.sliding_window import SlidingWindowSpec
from ostinato.scheduler.request import FinishReason
from ostinato.scheduler.scheduler import Scheduler
from tests.kv_cache.test_cache_eviction import chain_of
from tests.support.fake_runner import continuation
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    make_request,
    report_of,
    request_of,
    right_guesses,
    run_all,
    runner_for,
    serve,
    step,
    text,
)

B = BLOCK
WINDOW = 9
"""Two window blocks before a block boundary."""


def make_scheduler(
    num_window_blocks: int = 60, num_blocks: int = 200, num_slots: int = 0, **settings: Any
) -> Scheduler:
    """A model with a window of `WINDOW` in some of its layers. Counts are without what is null."""
    mode = "all" if num_slots else "none"
    slots = num_slots + 1 if num_slots else 0
    blocks = num_blocks + 1 if num_blocks else 0
    values = {"window": WINDOW, "eviction": "lru", "max_num_batched_tokens": 16, **settings}
    return make_caching_scheduler(mode, blocks, slots, num_window_blocks=num_window_blocks + 1, **values)


def window_block_ends(scheduler: Scheduler) -> set[int]:
    """Where the blocks end whose window blocks the index has."""
    return {window_block.entry.end for window_block in scheduler.cache.store.index.window_blocks}


# How many


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 16, 17, 33])
def test_a_request_keeps_all_that_later_tokens_and_a_hit_at_its_last_boundary_see_and_no_more(
    size: int, window: int
) -> None:
    rules = SlidingWindowSpec(window, size, 1)
    for position in range(4 * window + 3 * size):
        first = rules.first_block(position)
        # What a token at the last boundary sees.
        boundary = position // size * size
        assert first == max(0, boundary - window + 1) // size
        assert first * size <= max(0, position - window + 1)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 16, 17, 33])
@pytest.mark.parametrize("step", [1, 2, 7, 16, 33])
def test_what_is_reserved_is_enough_for_every_row_of_a_step_and_a_token_ahead(
    size: int, window: int, step: int
) -> None:
    rules = SlidingWindowSpec(window, size, step)
    for tokens in range(1, step + 1):
        for position in range(2 * window + 2 * size):
            held = -(-(position + tokens + 1) // size) - rules.first_block(position)
            assert held <= rules.blocks_per_request + (tokens - 1) // size
            assert held <= -(-(window - 1) // size) + -(-tokens // size) + 1
    assert rules.blocks_needed(10**6) == rules.blocks_per_request + (step - 1) // size
    assert rules.blocks_needed(1, 3) == 3
    assert rules.blocks_needed(10**6, 3) == 3 * rules.blocks_per_request + (step - 1) // size


@pytest.mark.parametrize(("prompt", "max_tokens"), [(3, 180), (100, 60), (150, 1)])
@pytest.mark.parametrize("num_blocks", [200, 0])
def test_a_long_request_holds_no_more_window_blocks_than_its_window_and_its_step_need(
    prompt: int, max_tokens: int, num_blocks: int
) -> None:
    rules = SlidingWindowSpec(WINDOW, B, 16)
    scheduler = make_scheduler(rules.blocks_needed(1000), num_blocks)
    runner = runner_for(scheduler)
    request = make_request("a", prompt, max_tokens)
    scheduler.add(request)
    most = 0
    while scheduler.has_unfinished:
        step(scheduler, runner)
        used = scheduler.cache.usage().window_blocks_used
        assert used <= rules.blocks_per_request
        most = max(most, used)
    assert most >= rules.blocks_per_window
    assert request.output_token_ids == continuation(request.prompt_token_ids, max_tokens)


def test_window_blocks_behind_the_next_token_are_let_go_of_where_drafts_were_not_kept() -> None:
    scheduler = make_scheduler(k=9)
    runner = runner_for(scheduler, right_guesses(0))
    request = make_request("a", 5, 30)
    scheduler.add(request)
    while scheduler.has_unfinished:
        step(scheduler, runner)
        if scheduler.has_unfinished:
            assert len(scheduler.cache.request_cache("a").window_block_table) <= request.num_computed_tokens // B + 1
    assert request.output_token_ids == continuation(request.prompt_token_ids, 30)


def test_requests_wait_until_window_blocks_can_be_reserved_and_none_is_preempted_in_its_prompt() -> None:
    rules = SlidingWindowSpec(WINDOW, B, 16)
    scheduler = make_scheduler(2 * rules.blocks_per_request + rules.shared_blocks)
    runner = runner_for(scheduler)
    requests = [make_request(name, 60, 3) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    seen = set()
    while scheduler.has_unfinished:
        rows = step(scheduler, runner)
        seen.add(len(scheduler.queues.running))
        assert len(rows) <= 2
    assert max(seen) == 2
    assert scheduler.counters.preemptions == 0
    assert all(each.finish_reason is FinishReason.LENGTH for each in requests)


def test_a_request_that_grows_where_no_window_block_can_be_reserved_preempts_the_last_in_rank() -> None:
    scheduler = make_scheduler(num_window_blocks=7)
    runner = runner_for(scheduler)
    requests = [make_request(name, 5, 40) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, runner)
    assert requests[0].num_preemptions == 0 < requests[1].num_preemptions
    assert all(each.output_token_ids == continuation(each.prompt_token_ids, 40) for each in requests)


def test_a_request_waits_where_its_window_block_would_soon_be_missed_by_one_that_runs() -> None:
    scheduler = make_scheduler(num_window_blocks=3)
    runner = runner_for(scheduler)
    scheduler.add(make_request("a", 5, 8))
    scheduler.add(make_request("b", 3, 1))
    assert [name for name, _, _ in step(scheduler, runner)] == ["a"]
    run_all(scheduler, runner)
    assert scheduler.counters.preemptions == 0


def test_a_row_has_no_more_drafts_than_window_blocks_can_be_reserved_for() -> None:
    scheduler = make_scheduler(num_window_blocks=5, k=9, max_num_batched_tokens=32)
    runner = runner_for(scheduler)
    for name in "ab":
        scheduler.add(make_request(name, 5, 16))
    step(scheduler, runner)
    # Both have two blocks, and one window block is left.
    assert [(row.end, row.num_drafts) for row in scheduler.schedule().rows] == [(6, 6), (6, 2)]


def test_window_blocks_for_a_window_and_a_step_serve_a_request_of_any_length_and_fewer_as_many_blocks() -> None:
    rules = SlidingWindowSpec(WINDOW, B, 16)
    enough = rules.blocks_per_request + rules.shared_blocks
    lengths = [
        CacheManager(0, 0, B, num_window_blocks=1 + n, window_block_rules=rules).max_request_tokens()
        for n in (enough, enough - 1)
    ]
    assert lengths[0] > 10**9
    assert lengths[1] == (enough - 1) * B
    assert CacheManager(31, 0, B, num_window_blocks=1 + enough, window_block_rules=rules).max_request_tokens() == 30 * B


# Hits


@pytest.mark.parametrize("num_slots", [0, 60])
@pytest.mark.parametrize("num_blocks", [200, 0])
def test_a_prompt_sent_again_hits_at_its_last_boundary_whatever_its_length(num_blocks: int, num_slots: int) -> None:
    for length in range(1, 6 * B):
        scheduler = make_scheduler(num_blocks=num_blocks, num_slots=num_slots)
        runner = runner_for(scheduler)
        serve(scheduler, runner, text(length))
        again = serve(scheduler, runner, text(length))
        assert report_of(again)[0] == (length - 1) // B * B


def test_the_next_turn_hits_at_the_end_of_the_answer_though_all_other_window_blocks_made_room() -> None:
    """An answer that ends in the middle of a block, after which other texts take all window blocks but those of its
    end.
    """
    for max_tokens in range(20, 20 + B):
        scheduler = make_scheduler(num_window_blocks=11)
        runner = runner_for(scheduler)
        first = serve(scheduler, runner, text(30), max_tokens)
        computed = first.num_tokens - 1
        store = scheduler.cache.store
        taken = store.allocate_window_blocks(store.window_blocks.num_free + store.window_blocks.num_idle - 2)
        store.window_blocks.release(taken)
        assert window_block_ends(scheduler) == {computed // B * B, computed // B * B - B}
        second = serve(scheduler, runner, first.tokens(0, first.num_tokens))
        assert report_of(second)[0] == computed // B * B


@pytest.mark.parametrize(("lost", "hit"), [(20, 28), (24, 20), (28, 24)])
def test_a_hit_goes_back_to_where_the_whole_window_is_and_what_lies_behind_is_an_evicted_window(
    lost: int, hit: int
) -> None:
    scheduler = make_scheduler()
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(30))
    store = scheduler.cache.store
    [window_block] = [window_block for window_block in store.index.window_blocks if window_block.entry.end == lost]
    store._drop_window_block(window_block)
    again = serve(scheduler, runner, text(30))
    assert report_of(again) == (hit, {"recomputed_tail": 2} | ({"evicted_window": 28 - hit} if hit < 28 else {}))
    assert store.counters.evicted_window_blocks == 0
    # What was computed again is there again.
    assert report_of(serve(scheduler, runner, text(30))) == (28, {"recomputed_tail": 2})


def test_with_state_a_hit_needs_a_checkpoint_and_the_window_before_it() -> None:
    scheduler = make_scheduler(num_slots=60, spacing=2 * B)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(33))
    store = scheduler.cache.store
    assert {each.entry.end for each in store.index.checkpoints} == {8, 16, 24, 32}
    [window_block] = [window_block for window_block in store.index.window_blocks if window_block.entry.end == 32]
    store._drop_window_block(window_block)
    longer = serve(scheduler, runner, text(41))
    # The checkpoint at 32 is of no use; those behind it were never there.
    assert report_of(longer) == (24, {"evicted_window": 8, "never_seen": 8, "recomputed_tail": 1})


def test_what_two_requests_compute_at_once_is_shared_and_no_window_block_is_lost() -> None:
    scheduler = make_scheduler()
    runner = runner_for(scheduler)
    for name in "ab":
        scheduler.add(request_of(name, text(14), 8))
    run_all(scheduler, runner)
    store = scheduler.cache.store
    assert store.counters.shared_blocks >= 3
    assert len(window_block_ends(scheduler)) == len(list(store.index.window_blocks)) == store.window_blocks.num_idle
    assert store.window_blocks.num_free + store.window_blocks.num_idle == store.window_blocks.capacity


# What goes first


def test_window_blocks_inside_a_text_make_room_before_those_that_its_end_needs() -> None:
    scheduler = make_scheduler(num_window_blocks=14)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(41, 1))
    assert len(window_block_ends(scheduler)) == 10
    serve(scheduler, runner, text(41, 2))
    assert report_of(serve(scheduler, runner, text(41, 1)))[0] == 40
    assert report_of(serve(scheduler, runner, text(41, 2)))[0] == 40
    assert scheduler.cache.store.counters.evicted_window_blocks > 0


def test_where_texts_were_seen_to_part_window_blocks_stay_though_none_ends_there() -> None:
    scheduler = make_scheduler(num_window_blocks=18)
    runner = runner_for(scheduler)
    common = text(40)
    serve(scheduler, runner, (*common, *text(9, 1)))
    assert report_of(serve(scheduler, runner, (*common, *text(9, 2))))[0] == 40
    for seed in (3, 4):
        serve(scheduler, runner, text(41, seed))
    assert report_of(serve(scheduler, runner, (*common, *text(9, 5))))[0] == 40


def test_a_text_that_must_be_computed_again_up_to_where_it_parts_keeps_its_window_there() -> None:
    scheduler = make_scheduler(num_window_blocks=18)
    runner = runner_for(scheduler)
    common = text(40)
    serve(scheduler, runner, (*common, *text(9, 1)))
    store = scheduler.cache.store
    for window_block in [each for each in store.index.window_blocks if each.entry.end <= 40]:
        store._drop_window_block(window_block)
    assert report_of(serve(scheduler, runner, (*common, *text(9, 2))))[0] == 0
    for seed in (3, 4):
        serve(scheduler, runner, text(41, seed))
    assert report_of(serve(scheduler, runner, (*common, *text(9, 5))))[0] == 40


def test_a_window_block_that_a_request_lets_go_of_goes_before_what_was_ranked_earlier() -> None:
    scheduler = make_scheduler(num_window_blocks=60)
    runner = runner_for(scheduler)
    for seed in range(10):
        serve(scheduler, runner, text(13, seed))
    store = scheduler.cache.store
    for window_block in [each for each in store.index.window_blocks if each.is_interior]:
        store._drop_window_block(window_block)
    # All that are left, two of each text, have been ranked, and a few of them will be the next to go.
    store.window_blocks.release(store.allocate_window_blocks(store.window_blocks.num_free + 1))
    scheduler.add(make_request("z", 30, 9))
    step(scheduler, runner)
    step(scheduler, runner)
    assert any(
        window_block.is_interior and store.window_blocks.is_idle(window_block.id)
        for window_block in store.index.window_blocks
    )
    before = [window_block for window_block in store.index.window_blocks if not window_block.is_interior]
    store.window_blocks.release(store.allocate_window_blocks(store.window_blocks.num_free + 1))
    assert [window_block for window_block in store.index.window_blocks if not window_block.is_interior] == before


def test_the_window_used_last_stays_longest() -> None:
    scheduler = make_scheduler(num_window_blocks=16)
    runner = runner_for(scheduler)
    for seed in (1, 2, 3, 1):
        serve(scheduler, runner, text(17, seed))
    store = scheduler.cache.store
    for window_block in [each for each in store.index.window_blocks if each.is_interior]:
        store._drop_window_block(window_block)
    store.window_blocks.release(store.allocate_window_blocks(store.window_blocks.num_free + 2 * 2))
    assert [store.match(chain_of(text(17, seed)), 16).hit for seed in (1, 2, 3)] == [16, 0, 0]


def test_a_block_without_a_window_block_at_a_texts_end_leaves_first() -> None:
    scheduler = make_scheduler(num_blocks=10)
    runner = runner_for(scheduler)
    for seed in (1, 2):
        serve(scheduler, runner, text(17, seed))
    store = scheduler.cache.store
    for window_block in [each for each in store.index.window_blocks if each.entry.token_ids == text(17, 2)[12:16]]:
        store._drop_window_block(window_block)
    store.blocks.release(store.allocate_blocks(store.blocks.num_free + 1))
    assert [len(store.match(chain_of(text(17, seed)), 16).matched) for seed in (1, 2)] == [4, 3]


def test_the_window_block_of_a_block_that_leaves_the_index_is_free() -> None:
    scheduler = make_scheduler(num_blocks=10)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(17))
    store = scheduler.cache.store
    free = store.window_blocks.num_free
    store.blocks.release(store.allocate_blocks(store.blocks.num_free + 1))
    assert store.window_blocks.num_free == free + 1
    scheduler.check_integrity()


def test_all_that_nobody_holds_is_forgotten() -> None:
    scheduler = make_scheduler()
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(17))
    assert scheduler.cache.store.clear()
    usage = scheduler.cache.usage()
    assert (usage.window_blocks_used, usage.window_blocks_cached) == (0, 0)
    assert report_of(serve(scheduler, runner, text(17))) == (0, {"never_seen": 16, "recomputed_tail": 1})


def test_what_a_running_request_has_let_go_of_is_forgotten_and_what_it_holds_is_not() -> None:
    scheduler = make_scheduler()
    runner = runner_for(scheduler)
    scheduler.add(make_request("a", 30, 9))
    step(scheduler, runner)
    step(scheduler, runner)
    held = scheduler.cache.usage().window_blocks_used
    assert scheduler.cache.usage().window_blocks_cached > 0
    assert not scheduler.cache.store.clear()
    usage = scheduler.cache.usage()
    assert (usage.window_blocks_used, usage.window_blocks_cached) == (held, 0)
    scheduler.check_integrity()
    run_all(scheduler, runner)


# The check


def test_the_check_finds_a_lost_reservation_a_window_block_beside_the_index_and_one_that_two_requests_may_write() -> (
    None
):
    def sound() -> CacheManager:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 30, 9))
        runner = runner_for(scheduler)
        step(scheduler, runner)
        step(scheduler, runner)
        return scheduler.cache

    cache = sound()
    cache.request_cache("a").num_reserved_blocks -= 1
    with pytest.raises(AssertionError, match="miscounted"):
        cache.check_integrity()
    cache = sound()
    [tip] = [cache.request_cache("a").last_entry]
    assert tip is not None
    assert tip.window_block is not None
    cache.store.window_blocks.retain((tip.window_block.id,))
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity()
    cache = sound()
    cache.store._drop_window_block(next(iter(cache.store.index.window_blocks)))
    cache.check_integrity()  # nobody held that one
    cache.request_cache("a").first_window_block -= 1
    with pytest.raises(AssertionError, match="null window block"):
        cache.check_integrity()
