"""Marks: checkpoints where the application wants them, pinned for a time, in fair shares."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.kv_cache.marks import Mark
from ostinato.scheduler.request import Request
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    report_of,
    request_of,
    run_all,
    runner_for,
    serve,
    step,
    text,
)

B = BLOCK
KINDS: dict[str, dict[str, Any]] = {
    "all": {"mode": "all"},
    "align": {"mode": "align"},
    "attention": {"mode": "none", "num_slots": 0},
    "windows": {"mode": "none", "num_slots": 0, "num_window_blocks": 80, "window": 6},
    "windows and state": {"mode": "all", "num_window_blocks": 80, "window": 6},
    "state": {"mode": "all", "num_blocks": 0},
}


def make(kind: str = "all", max_pins: int = 4, spacing: int = 16 * B, **more: Any) -> tuple[Scheduler, FakeRunner]:
    scheduler = make_caching_scheduler(**{**KINDS[kind], "spacing": spacing, "max_pins": max_pins, **more})
    return scheduler, runner_for(scheduler)


def ask(
    scheduler: Scheduler, runner: FakeRunner, tokens: tuple[int, ...], *positions: int, ttl: float = 10, **more: Any
) -> Request:
    return serve(scheduler, runner, tokens, marks=[Mark(position, ttl) for position in positions], **more)


def marks_of(request: Request) -> dict[int, bool]:
    assert request.cache_report is not None
    return request.cache_report.marks


def pinned(scheduler: Scheduler) -> list[int]:
    return sorted(entry.end for entry in scheduler.cache.store.pins.pinned)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_shares_no_more_than_a_mark_hits_up_to_the_block_boundary_before_it(kind: str) -> None:
    scheduler, runner = make(kind)
    first = ask(scheduler, runner, text(40), 14)
    assert first.cache_report is not None
    assert (marks_of(first), first.cache_report.created_tokens) == ({12: True}, 12)
    again = serve(scheduler, runner, (*text(13), *text(20, 5)))
    assert report_of(again)[0] == 12
    assert scheduler.cache.store.counters.pins_taken == 1


def test_without_the_mark_the_same_prompt_hits_nothing() -> None:
    scheduler, runner = make()
    ask(scheduler, runner, text(40))
    again = serve(scheduler, runner, (*text(13), *text(20, 5)))
    assert report_of(again) == (0, {"no_checkpoint": 12, "never_seen": 20, "recomputed_tail": 1})


def test_a_mark_at_the_very_end_of_a_prompt_stays_when_decoding_goes_on() -> None:
    scheduler, runner = make()
    first = ask(scheduler, runner, text(16), 16, max_tokens=30)
    assert (marks_of(first), pinned(scheduler)) == ({16: True}, [16])
    assert report_of(serve(scheduler, runner, (*text(16), 3, 5, 7)))[0] == 16


def test_a_mark_before_the_first_block_s_end_keeps_nothing_and_says_so() -> None:
    scheduler, runner = make()
    assert marks_of(ask(scheduler, runner, text(40), 3)) == {0: False}


def test_a_mark_for_whose_checkpoint_no_slot_is_free_is_reported() -> None:
    scheduler, runner = make(num_slots=2)
    assert (marks_of(ask(scheduler, runner, text(40), 12)), pinned(scheduler)) == ({12: False}, [])
    assert scheduler.cache.store.counters.checkpoints_not_taken > 0


def test_a_mark_inside_a_hit_is_pinned_where_a_checkpoint_stands_and_reported_where_none_does() -> None:
    scheduler, runner = make(spacing=2 * B)
    ask(scheduler, runner, text(38))
    again = ask(scheduler, runner, (*text(38), 1, 2, 3), 8, 12, 41)
    assert report_of(again)[0] == 36
    assert marks_of(again) == {8: True, 12: False, 40: True}
    assert again.cache_report is not None
    assert again.cache_report.created_tokens == 4


def test_the_miss_report_names_the_nearest_mark() -> None:
    scheduler, runner = make()
    ask(scheduler, runner, text(40), 12)
    again = serve(scheduler, runner, (*text(29), *text(20, 5)))
    assert report_of(again)[1]["no_checkpoint"] == 16
    assert again.cache_report is not None
    assert again.cache_report.nearest_mark == 12


# Eviction


@pytest.mark.parametrize("eviction", ["marconi", "lru"])
def test_what_is_pinned_is_evicted_after_everything_else(eviction: str) -> None:
    scheduler, runner = make(num_slots=8, num_blocks=60, eviction=eviction)
    ask(scheduler, runner, text(12, 1), 8)
    for seed in range(2, 12):
        ask(scheduler, runner, text(20, seed))
    assert scheduler.cache.store.counters.evicted_checkpoints > 5
    assert report_of(serve(scheduler, runner, (*text(9, 1), *text(9, 50))))[0] == 8
    scheduler.cache.store.allocate_slots(scheduler.cache.slots.num_available - 1)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_lost) == ([8], 0)
    scheduler.cache.store.allocate_slots(1)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_lost) == ([], 1)


def test_what_was_ranked_for_eviction_before_it_was_pinned_stays() -> None:
    scheduler, runner = make(num_slots=40, num_blocks=200, eviction="lru")
    for seed in range(16):
        serve(scheduler, runner, text(10, seed))
    store = scheduler.cache.store
    oldest = sorted(store.index.checkpoints, key=lambda checkpoint: checkpoint.last_use)
    # A look at all 16 ranks two of them.
    store.allocate_slots(scheduler.cache.slots.num_free + 1)
    assert oldest[0].entry.checkpoint is None
    assert store.pins.pin(oldest[1].entry, 10, None)
    store.allocate_slots(1)
    assert (oldest[1].entry.checkpoint, oldest[2].entry.checkpoint) == (oldest[1], None)


@pytest.mark.parametrize("eviction", ["lru", "marconi"])
def test_what_came_since_the_last_look_goes_before_what_is_pinned(eviction: str) -> None:
    scheduler, runner = make(num_slots=60, num_blocks=300, max_pins=17, eviction=eviction)
    for seed in range(17):
        ask(scheduler, runner, text(12, seed), 8, ttl=1000)
    store = scheduler.cache.store
    for checkpoint in [each for each in store.index.checkpoints if each.entry.pin is None]:
        store.drop_checkpoint(checkpoint)
    # A look at all 17, which are pinned, ranks two of them and takes one.
    store.slots.release(store.allocate_slots(store.slots.num_free + 1))
    assert (len(pinned(scheduler)), store.counters.pins_lost) == (16, 1)
    serve(scheduler, runner, text(9, 50))
    assert store.num_unpinned_slots > store.slots.num_free
    store.slots.release(store.allocate_slots(store.num_unpinned_slots))
    assert (len(pinned(scheduler)), store.counters.pins_lost) == (16, 1)


def test_the_blocks_before_a_mark_stay_though_those_of_newer_texts_go() -> None:
    scheduler, runner = make("attention", num_blocks=16)
    ask(scheduler, runner, text(20, 1), 12)
    for seed in range(2, 8):
        ask(scheduler, runner, text(30, seed))
    again = serve(scheduler, runner, (*text(20, 1), 1))
    assert report_of(again)[0] == 12
    assert scheduler.cache.store.counters.evicted_blocks > 10


def test_the_window_blocks_before_a_mark_stay() -> None:
    scheduler, runner = make("windows", num_window_blocks=14, max_num_batched_tokens=16)
    ask(scheduler, runner, text(30, 1), 16)
    for seed in range(2, 8):
        ask(scheduler, runner, text(40, seed))
    assert scheduler.cache.store.counters.evicted_window_blocks > 5
    assert report_of(serve(scheduler, runner, (*text(18, 1), *text(9, 50))))[0] == 16


def test_a_running_request_gets_what_is_pinned_if_nothing_else_is_left() -> None:
    scheduler, runner = make("attention", num_blocks=8)
    ask(scheduler, runner, text(20, 1), 20)
    serve(scheduler, runner, text(26, 2))
    counters = scheduler.cache.store.counters
    assert (pinned(scheduler), counters.pins_lost) == ([], 1)


def test_no_checkpoint_is_taken_in_the_place_of_a_pinned_one() -> None:
    scheduler, runner = make(num_slots=4, spacing=B, max_pins=2)
    ask(scheduler, runner, text(12, 1), 4, 8)
    assert pinned(scheduler) == [4, 8]
    before = scheduler.cache.store.counters.checkpoints_not_taken
    ask(scheduler, runner, text(30, 2), max_tokens=12)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_lost) == ([4, 8], 0)
    assert scheduler.cache.store.counters.checkpoints_not_taken > before


def test_a_pinned_checkpoint_that_is_hit_is_not_overwritten_for_a_spare_slot() -> None:
    scheduler, runner = make(num_slots=4, max_num_seqs=2, max_pins=1)
    ask(scheduler, runner, text(12, 1), 8)
    for name in "ab":
        scheduler.add(request_of(name, (*text(9, 1), *text(9, ord(name))), 4))
    run_all(scheduler, runner)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_lost) == ([8], 0)


def test_a_reset_ends_all_pins() -> None:
    scheduler, runner = make()
    ask(scheduler, runner, text(40), 12, 20)
    assert scheduler.cache.store.clear()
    assert (pinned(scheduler), scheduler.cache.usage().slots_cached) == ([], 0)
    assert scheduler.cache.store.counters.pins_lost == 2
    scheduler.check_integrity()


# Time


def test_a_pin_ends_when_a_request_arrives_after_its_time_and_a_hit_lets_it_begin_anew() -> None:
    scheduler, runner = make()
    ask(scheduler, runner, text(40), 12, arrival=100)
    ask(scheduler, runner, text(8, 3), arrival=109)
    assert pinned(scheduler) == [12]
    assert report_of(ask(scheduler, runner, (*text(13), *text(9, 4)), arrival=109))[0] == 12
    ask(scheduler, runner, text(8, 5), arrival=118)
    assert pinned(scheduler) == [12]
    ask(scheduler, runner, text(8, 6), arrival=119)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_expired) == ([], 1)
    # It is cached like any other from then on.
    assert report_of(serve(scheduler, runner, (*text(13), *text(9, 7))))[0] == 12


def test_of_two_times_for_one_prefix_the_longer_one_counts() -> None:
    scheduler, runner = make()
    ask(scheduler, runner, text(40), 12, arrival=100, ttl=50)
    ask(scheduler, runner, text(40), 12, arrival=110, ttl=10)
    ask(scheduler, runner, text(8, 3), arrival=159)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_taken) == ([12], 1)


def test_another_client_that_marks_a_pinned_prefix_refreshes_it_and_does_not_lengthen_its_time() -> None:
    scheduler, runner = make()
    ask(scheduler, runner, text(40), 12, arrival=100, client="a")
    assert marks_of(ask(scheduler, runner, text(40), 12, arrival=105, client="b", ttl=3600)) == {12: True}
    ask(scheduler, runner, text(8, 3), arrival=114)
    assert pinned(scheduler) == [12]
    ask(scheduler, runner, text(8, 4), arrival=116)
    assert (pinned(scheduler), scheduler.cache.store.counters.pins_expired) == ([], 1)


# Shares


def test_clients_have_equal_shares_and_the_one_above_its_share_gives_up_what_ends_first() -> None:
    scheduler, runner = make(max_pins=3)
    for seed, ttl in ((1, 30), (2, 10), (3, 20)):
        ask(scheduler, runner, text(12, seed), 8, client="a", ttl=ttl)
    assert marks_of(ask(scheduler, runner, text(12, 4), 8, client="b")) == {8: True}
    assert [entry.token_ids for entry in scheduler.cache.store.pins.pinned] == [text(8, seed)[B:] for seed in (1, 3, 4)]
    # With one more, it would have as many as the other: its own goes.
    ask(scheduler, runner, text(12, 5), 8, client="b")
    assert [entry.token_ids for entry in scheduler.cache.store.pins.pinned] == [text(8, seed)[B:] for seed in (1, 3, 5)]
    counts = scheduler.cache.store.counters
    assert (counts.pins_displaced, counts.pins_refused) == (2, 0)


def test_a_client_without_pins_gets_none_if_all_others_have_one_each() -> None:
    scheduler, runner = make(max_pins=2)
    for seed, client in ((1, "a"), (2, "b")):
        ask(scheduler, runner, text(12, seed), 8, client=client)
    assert marks_of(ask(scheduler, runner, text(12, 3), 8, client="c")) == {8: False}
    assert scheduler.cache.store.counters.pins_refused == 1


def test_blocks_of_pinned_prefixes_are_bounded_and_those_that_prefixes_share_count_once() -> None:
    scheduler, runner = make(max_pinned_blocks=4)
    ask(scheduler, runner, text(40), 8, 16)
    assert (scheduler.cache.store.pins.num_blocks, pinned(scheduler)) == (4, [8, 16])
    assert marks_of(ask(scheduler, runner, text(40, 2), 20)) == {20: False}
    ask(scheduler, runner, text(12, 3), 4)
    assert scheduler.cache.store.pins.num_blocks <= 4
    assert scheduler.cache.store.counters.pins_displaced == 2


def test_a_pin_that_is_refused_in_the_end_displaces_none() -> None:
    scheduler, runner = make(max_pinned_blocks=8)
    serve(scheduler, runner, text(40), marks=[Mark(8, 20), Mark(32, 10)], client="a")
    # The pin at 32 would end for it, and that at 8 leaves no room all the same.
    assert marks_of(ask(scheduler, runner, text(40, 2), 32, client="b")) == {32: False}
    counts = scheduler.cache.store.counters
    assert (pinned(scheduler), counts.pins_displaced, counts.pins_refused) == ([8, 32], 0, 1)
    # With 6 blocks, the end of that pin makes room.
    assert marks_of(ask(scheduler, runner, text(40, 3), 24, client="b")) == {24: True}
    assert (pinned(scheduler), counts.pins_displaced) == ([8, 24], 1)


# Requests that do not run through


def test_a_preempted_request_pins_its_marks_all_the_same() -> None:
    scheduler, runner = make(max_num_batched_tokens=8)
    request = request_of("a", text(40), 2, marks=[Mark(30, 10)])
    scheduler.add(request)
    step(scheduler, runner)
    assert scheduler.preempt("a")
    run_all(scheduler, runner)
    assert (request.num_preemptions, marks_of(request), pinned(scheduler)) == (1, {28: True}, [28])


def test_an_aborted_request_leaves_the_marks_that_it_has_reached() -> None:
    scheduler, runner = make(max_num_batched_tokens=16)
    scheduler.add(request_of("a", text(40), 2, marks=[Mark(12, 10), Mark(30, 10)]))
    step(scheduler, runner)
    scheduler.abort("a")
    assert pinned(scheduler) == [12]
    scheduler.check_integrity()
