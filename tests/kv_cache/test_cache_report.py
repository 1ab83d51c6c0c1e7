"""Every token of a prompt that had to be computed has a cause."""

from __future__ import annotations

from ostinato.kv_cache.prefix_index import MissCause
from ostinato.scheduler.scheduler import Scheduler
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


def test_a_prompt_that_nobody_sent_before_was_never_seen_but_for_its_tail() -> None:
    for length, tail in ((9, 1), (11, 3), (12, 4), (3, 3)):
        scheduler = make_caching_scheduler()
        report = report_of(serve(scheduler, runner_for(scheduler), text(length)))
        assert report == (0, {"recomputed_tail": tail} | ({"never_seen": length - tail} if length > tail else {}))


def test_a_prompt_sent_again_computes_its_tail_again_which_is_a_whole_block_where_it_ends_at_a_boundary() -> None:
    for length, hit in ((9, 8), (11, 8), (12, 8), (3, 0)):
        scheduler = make_caching_scheduler()
        runner = runner_for(scheduler)
        serve(scheduler, runner, text(length))
        assert report_of(serve(scheduler, runner, text(length))) == (hit, {"recomputed_tail": length - hit})


def test_what_goes_on_from_a_hit_was_never_seen() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(9))
    longer = serve(scheduler, runner, text(22))
    assert report_of(longer) == (8, {"never_seen": 12, "recomputed_tail": 2})


def test_blocks_that_had_to_make_room_are_evicted_ones_and_not_any_more_once_they_are_back() -> None:
    scheduler = make_caching_scheduler("none", num_blocks=9, num_slots=0, eviction="lru")
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(17, 1))
    # Of eight blocks five are taken for this one, one of them for its tail.
    serve(scheduler, runner, text(17, 2))
    assert scheduler.cache.store.counters.evicted_blocks == 1
    assert report_of(serve(scheduler, runner, text(17, 1))) == (12, {"evicted_block": 4, "recomputed_tail": 1})
    assert report_of(serve(scheduler, runner, text(17, 1))) == (16, {"recomputed_tail": 1})


def test_a_prompt_may_be_evicted_in_part_and_go_on_with_what_was_never_seen() -> None:
    scheduler = make_caching_scheduler("none", num_blocks=9, num_slots=0, eviction="lru")
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(17, 1))
    serve(scheduler, runner, text(21, 2))
    longer = serve(scheduler, runner, text(25, 1))
    assert report_of(longer) == (8, {"evicted_block": 8, "never_seen": 8, "recomputed_tail": 1})


def test_a_state_that_had_to_make_room_is_an_evicted_checkpoint() -> None:
    scheduler = make_caching_scheduler("all", num_slots=4, eviction="lru")
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(11, 1))
    for seed in (2, 3, 4):
        serve(scheduler, runner, text(5, seed))
    assert scheduler.cache.store.counters.evicted_checkpoints > 0
    assert report_of(serve(scheduler, runner, text(11, 1))) == (0, {"evicted_checkpoint": 8, "recomputed_tail": 3})


def test_blocks_before_an_evicted_checkpoint_count_as_its_and_those_after_it_as_without_one() -> None:
    scheduler = make_caching_scheduler("align", spacing=100)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(9))
    # The end of this one is not hit below, and no checkpoint stands between.
    serve(scheduler, runner, text(21), max_tokens=1)
    (evicted,) = (each for each in scheduler.cache.store.index.checkpoints if each.entry.end == 8)
    scheduler.cache.store.evict_checkpoint(evicted)
    other = serve(scheduler, runner, (*text(18), 1, 2, 3, 4))
    assert report_of(other) == (0, {"evicted_checkpoint": 8, "no_checkpoint": 8, "never_seen": 4, "recomputed_tail": 2})


def test_a_prompt_that_leaves_another_before_its_checkpoint_finds_none() -> None:
    scheduler = make_caching_scheduler("all", spacing=100, branches=False)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(30))
    other = serve(scheduler, runner, (*text(18), 1, 2, 3, 4, 5, 6))
    assert report_of(other) == (0, {"no_checkpoint": 16, "never_seen": 4, "recomputed_tail": 4})


def test_a_checkpoint_that_was_given_up_for_one_further_on_is_not_an_evicted_one() -> None:
    scheduler = make_caching_scheduler("all", spacing=100)
    runner = runner_for(scheduler)
    first = serve(scheduler, runner, text(3), max_tokens=30)
    again = serve(scheduler, runner, first.tokens(0, 20))
    assert report_of(again) == (0, {"no_checkpoint": 16, "recomputed_tail": 4})


def test_a_request_for_prompt_logprobs_does_not_want_the_cache() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(14))
    request = serve(scheduler, runner, text(14), wants_prompt_logprobs=True, sampling_state=text(14))
    assert report_of(request) == (0, {"not_wanted": 14})
    assert request.cache_report is not None
    assert request.cache_report.cached_tokens == 0


def test_a_prompt_of_several_causes_names_each_and_they_add_up() -> None:
    scheduler = make_caching_scheduler("all", spacing=4 * B)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(31))
    other = serve(scheduler, runner, (*text(26), *text(13, seed=2)))
    cached, misses = report_of(other)
    assert (cached, misses) == (16, {"no_checkpoint": 8, "never_seen": 12, "recomputed_tail": 3})
    assert cached + sum(misses.values()) == 39


def test_a_report_tells_of_the_first_admission_and_a_preemption_does_not_change_it() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    request = make_request("a", 14, max_tokens=9)
    assert request.cache_report is None
    scheduler.add(request)
    assert request.cache_report is None
    step(scheduler, runner)
    before = request.cache_report
    scheduler.preempt("a")
    run_all(scheduler, runner)
    assert request.cache_report is before
    assert before is not None
    assert before.misses == {"never_seen": 12, "recomputed_tail": 2}
    assert scheduler.prefix_counters.restored_tokens == 12


def test_the_counters_are_the_sums_of_the_reports() -> None:
    scheduler = make_caching_scheduler()
    runner = runner_for(scheduler)
    prompts = [text(14), text(14), (*text(9), 1, 2, 3), text(14, 2)]
    reports = [report_of(serve(scheduler, runner, prompt)) for prompt in prompts]
    counters = scheduler.prefix_counters
    assert counters.cached_tokens == sum(cached for cached, _ in reports)
    assert counters.misses == {cause: sum(misses.get(cause, 0) for _, misses in reports) for cause in MissCause}
    assert counters.cached_tokens + sum(counters.misses.values()) == sum(map(len, prompts))


def test_a_request_that_waits_for_memory_is_counted_once_when_it_is_admitted() -> None:
    scheduler = make_caching_scheduler("none", num_blocks=5, num_slots=0)
    runner = runner_for(scheduler)
    scheduler.add(request_of("a", text(12), max_tokens=4))
    waiting = request_of("b", text(12))
    scheduler.add(waiting)
    step(scheduler, runner)
    step(scheduler, runner)
    assert waiting.cache_report is None
    assert cached_and_missed(scheduler) == 12
    run_all(scheduler, runner)
    assert report_of(waiting)[0] == 8
    assert cached_and_missed(scheduler) == 24


def cached_and_missed(scheduler: Scheduler) -> int:
    return scheduler.prefix_counters.cached_tokens + sum(scheduler.prefix_counters.misses.values())
