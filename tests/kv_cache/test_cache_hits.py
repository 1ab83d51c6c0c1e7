"""What a request finds in the cache when there is memory enough, for every kind of model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, continuation
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    make_request,
    make_scheduler,
    report_of,
    request_of,
    run_all,
    runner_for,
    serve,
    step,
    text,
)

B = BLOCK

modes = st.sampled_from(["align", "all"])
lengths = st.integers(1, 70)


@st.composite
def caches(draw: st.DrawFn, with_state: bool = False) -> tuple[Scheduler, FakeRunner]:
    """With memory for everything that a test does."""
    kind = draw(st.sampled_from(["hybrid", "state"] if with_state else ["hybrid", "state", "attention"]))
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    scheduler = make_caching_scheduler(
        "none" if kind == "attention" else draw(modes),
        num_blocks=0 if kind == "state" else 2000,
        num_slots=0 if kind == "attention" else 2000,
        spacing=draw(st.integers(1, 4)) * block_size,
        eviction=draw(st.sampled_from(["marconi", "lru"])),
        block_size=block_size,
        max_num_batched_tokens=draw(st.integers(3, 80)),
        max_model_len=500,
    )
    return scheduler, runner_for(scheduler)


@settings(deadline=None, max_examples=60)
@given(cache=caches(), length=lengths, max_tokens=st.integers(1, 6))
def test_a_prompt_that_is_sent_again_hits_at_its_last_boundary(
    cache: tuple[Scheduler, FakeRunner], length: int, max_tokens: int
) -> None:
    scheduler, runner = cache
    assert report_of(serve(scheduler, runner, text(length), max_tokens))[0] == 0
    hit = (length - 1) // scheduler.cache.block_size * scheduler.cache.block_size
    for _ in range(2):
        again = serve(scheduler, runner, text(length), max_tokens)
        assert report_of(again) == (hit, {"recomputed_tail": length - hit})


@settings(deadline=None, max_examples=30)
@given(cache=caches(), turns=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=5))
def test_each_turn_of_a_conversation_hits_at_the_last_boundary_that_the_one_before_computed(
    cache: tuple[Scheduler, FakeRunner], turns: list[tuple[int, int]]
) -> None:
    scheduler, runner = cache
    conversation: tuple[int, ...] = ()
    computed = 0
    for number, (length, max_tokens) in enumerate(turns):
        conversation += text(length, number)
        turn = serve(scheduler, runner, conversation, max_tokens)
        assert report_of(turn)[0] == computed // scheduler.cache.block_size * scheduler.cache.block_size
        conversation += tuple(turn.output_token_ids)
        # The last token of an output is never computed.
        computed = len(conversation) - 1


@settings(deadline=None, max_examples=60)
@given(
    cache=caches(with_state=True),
    common=st.integers(1, 60),
    rests=st.tuples(st.integers(10, 30), st.integers(10, 30), st.integers(10, 30)),
)
def test_the_second_request_that_leaves_a_prefix_takes_a_checkpoint_where_it_does_and_the_third_hits_there(
    cache: tuple[Scheduler, FakeRunner], common: int, rests: tuple[int, int, int]
) -> None:
    scheduler, runner = cache
    branch = common // scheduler.cache.block_size * scheduler.cache.block_size
    # The tokens after the common ones differ at once.
    first, second, third = ((*text(common), number, *text(rest)) for number, rest in enumerate(rests))
    serve(scheduler, runner, first)
    hit, misses = report_of(serve(scheduler, runner, second))
    assert hit <= branch
    assert misses.get("no_checkpoint", 0) == branch - hit
    hit, misses = report_of(serve(scheduler, runner, third))
    assert hit == branch
    assert set(misses) == {"never_seen", "recomputed_tail"}


@pytest.mark.parametrize("mode", ["align", "all"])
def test_without_branches_the_third_request_hits_no_more_than_the_second(mode: StateCacheMode) -> None:
    hits = {}
    for branches in (True, False):
        scheduler = make_caching_scheduler(mode, spacing=8 * B, branches=branches)
        runner = runner_for(scheduler)
        requests = [serve(scheduler, runner, text(21) + text(30, number)) for number in (1, 2, 3)]
        hits[branches] = [report_of(request)[0] for request in requests]
    assert hits == {True: [0, 0, 20], False: [0, 0, 0]}


def test_a_prompt_that_is_moved_by_a_few_tokens_behind_a_common_beginning_hits_what_is_common() -> None:
    scheduler = make_caching_scheduler(spacing=2 * B)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(30))
    assert report_of(serve(scheduler, runner, (*text(22), 1, 1, 1, *text(30)[22:])))[0] == 16
    assert report_of(serve(scheduler, runner, (*text(22), 2, 2, *text(30)[22:])))[0] == 20
    assert report_of(serve(scheduler, runner, (3, *text(30))))[0] == 0


def test_a_prompt_shorter_than_two_blocks_hits_as_soon_as_it_has_one_full_block_and_a_token() -> None:
    for length, hit in ((B - 1, 0), (B, 0), (B + 1, B)):
        scheduler = make_caching_scheduler()
        runner = runner_for(scheduler)
        serve(scheduler, runner, text(length))
        assert report_of(serve(scheduler, runner, text(length)))[0] == hit


@pytest.mark.parametrize("kind", ["hybrid", "state", "attention"])
def test_requests_of_different_salts_do_not_find_each_other(kind: str) -> None:
    scheduler = make_caching_scheduler(
        "none" if kind == "attention" else "all", 0 if kind == "state" else 99, 0 if kind == "attention" else 99
    )
    runner = runner_for(scheduler)
    for salt in (None, "one", "two", ""):
        assert report_of(serve(scheduler, runner, text(14), cache_salt=salt))[0] == 0
        assert report_of(serve(scheduler, runner, text(14), cache_salt=salt))[0] == 12


def test_a_model_with_state_layers_in_mode_none_hits_nothing_and_says_that_no_checkpoint_was_kept() -> None:
    scheduler = make_caching_scheduler("none")
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(14), max_tokens=20)
    assert report_of(serve(scheduler, runner, text(14))) == (0, {"no_checkpoint": 12, "recomputed_tail": 2})
    assert list(scheduler.cache.store.index.checkpoints) == []


def test_a_prompt_of_which_all_but_one_token_is_cached_is_computed_as_a_decode_row() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(3 * B + 1))
    scheduler.add(make_request("other", 9))
    request = request_of("same", text(3 * B + 1))
    scheduler.add(request)
    batch = scheduler.schedule()
    assert [(row.request_id, row.start) for row in batch.rows] == [("same", 3 * B), ("other", 0)]
    assert batch.num_decode_rows == 1
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, 5)


@pytest.mark.parametrize("kind", ["hybrid", "state", "attention"])
def test_two_requests_that_compute_one_text_at_once_share_its_blocks_and_its_checkpoint_afterwards(kind: str) -> None:
    scheduler = make_caching_scheduler(
        "none" if kind == "attention" else "all", 0 if kind == "state" else 99, 0 if kind == "attention" else 99, 4 * B
    )
    runner = runner_for(scheduler)
    requests = [request_of(name, text(4 * B + 3), max_tokens=9) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    assert step(scheduler, runner) == [("a", 0, 19), ("b", 0, 19)]
    cache = scheduler.cache
    if kind != "state":
        tables = [cache.request_cache(name).block_table for name in "ab"]
        assert tables[0][:4] == tables[1][:4]
        assert tables[0][4] != tables[1][4]
        assert [cache.blocks.references(block) for block in tables[0]] == [2, 2, 2, 2, 1]
        assert cache.usage().blocks_used == 6
        assert cache.store.counters.shared_blocks == 4
    if kind != "attention":
        assert [each.entry.end for each in cache.store.index.checkpoints] == [4 * B]
        # Each has its own state; the second one's checkpoint was given up for the first one's.
        assert (cache.usage().slots_used, cache.usage().slots_cached) == (2, 1)
    run_all(scheduler, runner)
    assert requests[0].output_token_ids == requests[1].output_token_ids == continuation(text(4 * B + 3), 9)
    assert len(cache.store.index) == (4 * B + 3 + 8) // B


def test_a_request_shares_the_blocks_of_one_that_still_runs_and_keeps_them_when_that_one_ends() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    first, second = request_of("a", text(14), max_tokens=4), request_of("b", text(14), max_tokens=9)
    scheduler.add(first)
    step(scheduler, runner)
    scheduler.add(second)
    assert step(scheduler, runner) == [("a", 14, 1), ("b", 12, 2)]
    cache = scheduler.cache
    assert cache.request_cache("a").block_table[:3] == cache.request_cache("b").block_table[:3]
    run_all(scheduler, runner)
    assert second.output_token_ids == continuation(second.prompt_token_ids, 9)


def test_prompt_logprobs_are_computed_and_not_cached_but_others_may_use_what_was_computed() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    for _ in range(2):
        request = serve(scheduler, runner, text(14), wants_prompt_logprobs=True, sampling_state=text(14))
        assert report_of(request) == (0, {"not_wanted": 14})
    assert report_of(serve(scheduler, runner, text(14)))[0] == 12


def test_a_request_that_computes_all_of_its_tokens_takes_no_hit_and_others_may_use_what_it_computed() -> None:
    scheduler = make_caching_scheduler(max_num_batched_tokens=10)
    runner = runner_for(scheduler)
    for _ in range(2):
        request = serve(scheduler, runner, text(14), skips_prefix_cache=True, sampling_state=text(14))
        assert report_of(request) == (0, {"not_wanted": 14})
    assert report_of(serve(scheduler, runner, text(14)))[0] == 12
    preempted = make_request("a", 30, skips_prefix_cache=True)
    scheduler.add(preempted)
    step(scheduler, runner)
    assert scheduler.preempt("a")
    assert step(scheduler, runner) == [("a", 0, 10)]
    run_all(scheduler, runner)


def test_a_cache_that_is_off_says_not_wanted_and_indexes_nothing() -> None:
    scheduler = make_scheduler()
    runner = runner_for(scheduler)
    for _ in range(2):
        assert report_of(serve(scheduler, runner, text(14), max_tokens=9)) == (0, {"not_wanted": 14})
    assert len(scheduler.cache.store.index) == 0
    assert scheduler.cache.usage().blocks_cached == scheduler.cache.usage().slots_cached == 0


@pytest.mark.parametrize("kind", ["hybrid", "state"])
def test_a_preempted_request_comes_back_at_its_trailing_checkpoint(kind: str) -> None:
    scheduler = make_caching_scheduler("all", 0 if kind == "state" else 99, spacing=100)
    runner = runner_for(scheduler)
    request = make_request("a", 14, max_tokens=20)
    scheduler.add(request)
    for _ in range(9):
        step(scheduler, runner)
    assert request.num_computed_tokens == 22
    assert scheduler.preempt("a")
    scheduler.check_integrity()
    assert step(scheduler, runner) == [("a", 20, 3)]
    assert (scheduler.prefix_counters.restored_tokens, scheduler.prefix_counters.cached_tokens) == (20, 0)
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, 20)


def test_a_preempted_request_that_is_owed_prompt_logprobs_takes_no_more_than_those_delivered() -> None:
    scheduler = make_caching_scheduler(max_num_batched_tokens=10)
    runner = runner_for(scheduler)
    request = make_request("a", 30, max_tokens=4, wants_prompt_logprobs=True)
    scheduler.add(request)
    step(scheduler, runner)
    assert request.num_prompt_logprobs == 10
    assert scheduler.preempt("a")
    assert step(scheduler, runner) == [("a", 8, 10)]
    updates = run_all(scheduler, runner)
    assert sum(len(update.prompt_logprobs) for update in updates) == 29 - 18
    assert request.output_token_ids == continuation(request.prompt_token_ids, 4)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_failed_step_and_a_broken_row_index_nothing_and_what_was_computed_before_stays(mode: StateCacheMode) -> None:
    scheduler = make_caching_scheduler(mode, max_num_batched_tokens=8)
    runner = runner_for(scheduler)
    cache = scheduler.cache
    scheduler.add(make_request("a", 30))
    step(scheduler, runner)
    batch = scheduler.schedule()
    runner.fail(batch)
    scheduler.fail(batch, ValueError("broken"))
    scheduler.check_integrity()
    runner.check_index(cache.store.index)
    assert len(cache.store.index) == 2
    scheduler.add(make_request("a", 30))
    batch = scheduler.schedule()
    assert batch.rows[0].start == 8
    scheduler.update(runner.run(batch, broken={"a"}))
    scheduler.check_integrity()
    assert (len(cache.store.index), len(list(cache.store.index.checkpoints))) == (2, 1)
    assert cache.usage().blocks_used == cache.usage().slots_used == 0
    assert cache.blocks.num_free + cache.usage().blocks_cached == cache.usage().blocks_total


def test_a_request_that_is_aborted_in_flight_indexes_nothing_of_that_step() -> None:
    scheduler = make_caching_scheduler(max_num_batched_tokens=8)
    runner = runner_for(scheduler)
    scheduler.add(make_request("a", 30))
    step(scheduler, runner)
    batch = scheduler.schedule()
    scheduler.abort("a")
    scheduler.check_integrity()
    assert scheduler.cache.usage().blocks_used == 8
    scheduler.update(runner.run(batch))
    scheduler.check_integrity()
    assert len(scheduler.cache.store.index) == 2
    assert scheduler.cache.usage().slots_used == 0


# Forgetting


@pytest.mark.parametrize("mode", ["align", "all"])
def test_what_is_forgotten_is_as_if_it_had_never_been_seen(mode: StateCacheMode) -> None:
    scheduler = make_caching_scheduler(mode, num_blocks=14, num_slots=7)
    runner = runner_for(scheduler)
    for seed in range(4):  # more than there is room for, so that some of it is evicted
        serve(scheduler, runner, text(26, seed))
    counters = replace(scheduler.cache.store.counters)
    assert counters.evicted_blocks > 0
    assert scheduler.cache.store.clear()
    scheduler.check_integrity()
    assert scheduler.cache.blocks.num_free == 13
    assert scheduler.cache.slots.num_free == 6
    assert scheduler.cache.store.counters == counters
    for seed in range(2):
        assert report_of(serve(scheduler, runner, text(26, seed))) == (0, {"never_seen": 24, "recomputed_tail": 2})


def test_what_a_running_request_holds_is_not_forgotten_but_its_checkpoints_that_nobody_reads_are() -> None:
    scheduler = make_caching_scheduler("all")
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(26, seed=1))
    scheduler.add(request_of("running", text(26), max_tokens=9))
    step(scheduler, runner)
    assert not scheduler.cache.store.clear()
    scheduler.check_integrity()
    assert (len(scheduler.cache.store.index), scheduler.cache.blocks.num_idle) == (24 // BLOCK, 0)
    assert list(scheduler.cache.store.index.checkpoints) == []
    assert report_of(serve(scheduler, runner, text(26))) == (0, {"no_checkpoint": 24, "recomputed_tail": 2})
    assert scheduler.cache.store.clear()
