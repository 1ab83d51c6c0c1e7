"""Rows of several clients: one that is below its share does not wait for one that is above."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from ostinato.scheduler.decode import OverlapBlocker
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import FinishReason, StopConditions
from ostinato.scheduler.request_queues import Client
from ostinato.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler_properties import KINDS, PIECES, make_harness
from tests.support.fake_runner import continuation
from tests.support.overlap_harness import AheadHarness
from tests.support.scheduler_harness import Harness, Sizes, Wish
from tests.support.scheduler_steps import (
    answer,
    make_caching_scheduler,
    make_request,
    make_scheduler,
    run_all,
    runner_for,
    step,
)


def flood(scheduler: Scheduler, client: str, count: int, max_tokens: int = 30, prompt: int = 5):
    """Requests of one client, which were added."""
    requests = [make_request(f"{client}{i}", prompt, max_tokens, client=client) for i in range(count)]
    for request in requests:
        scheduler.add(request)
    return requests


def rows_of(scheduler: Scheduler) -> Counter[str | None]:
    return Counter(request.client for request in scheduler.queues.running)


def names(rows: Iterable[tuple[str, int, int]]) -> set[str]:
    return {name for name, _, _ in rows}


def test_a_client_without_a_row_gets_that_of_the_newest_request_of_one_above_its_share_in_the_next_step() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=4)
    runner = runner_for(scheduler)
    many = flood(scheduler, "a", 12)
    for _ in range(10):
        step(scheduler, runner)
    [one] = flood(scheduler, "b", 1, max_tokens=4)
    assert names(step(scheduler, runner)) == {"a0", "a1", "a2", "b0"}
    assert (scheduler.counters.yielded_rows, scheduler.counters.preemptions) == (1, 1)
    while scheduler.num_running:
        step(scheduler, runner)
        if one.finish_reason is not None:
            break
    # It comes back before those that have never run, and finds its prefix in the cache.
    assert "a3" in names(step(scheduler, runner))
    assert scheduler.prefix_counters.restored_tokens > 0
    run_all(scheduler, runner)
    for request in [*many, one]:
        assert request.output_token_ids == continuation(request.prompt_token_ids, request.stop.max_tokens)


@pytest.mark.parametrize("num_long", [3, 1])
def test_a_short_prompt_of_a_client_without_a_row_does_not_wait_for_the_prompts_of_another(num_long: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_seqs=8, num_blocks=400)
    runner = runner_for(scheduler)
    long = flood(scheduler, "a", num_long, max_tokens=2, prompt=150)
    step(scheduler, runner)
    [short] = flood(scheduler, "b", 1, max_tokens=2, prompt=3)
    assert step(scheduler, runner) == [("a0", 32, 29), ("b0", 0, 3)]
    run_all(scheduler, runner)
    for request in [*long, short]:
        assert request.output_token_ids == continuation(request.prompt_token_ids, 2)


def test_running_prompts_leave_others_half_of_a_step_at_most_and_nothing_to_their_own_client() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_seqs=8, num_blocks=400)
    runner = runner_for(scheduler)
    flood(scheduler, "a", 2, max_tokens=2, prompt=150)
    assert step(scheduler, runner) == [("a0", 0, 32)]
    for client in "bcd":
        flood(scheduler, client, 1, max_tokens=9, prompt=9)
    assert step(scheduler, runner) == [("a0", 32, 23), ("b0", 0, 9)]
    assert ("c0", 0, 9) in step(scheduler, runner)


def test_a_request_of_lower_priority_gets_no_part_of_a_step_that_a_prompt_would_fill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, policy="priority", num_blocks=400)
    runner = runner_for(scheduler)
    flood(scheduler, "a", 1, prompt=150)
    step(scheduler, runner)
    scheduler.add(make_request("b0", 3, 2, client="b", priority=1))
    assert step(scheduler, runner) == [("a0", 32, 32)]


def test_two_clients_that_both_flood_come_to_equal_rows_and_take_none_back() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=6, num_blocks=400, num_slots=400)
    runner = runner_for(scheduler)
    flood(scheduler, "a", 20, max_tokens=60)
    step(scheduler, runner)
    flood(scheduler, "b", 20, max_tokens=60)
    for _ in range(3):
        step(scheduler, runner)
    assert rows_of(scheduler) == {"a": 3, "b": 3}
    assert scheduler.counters.yielded_rows == 3
    run_all(scheduler, runner)
    assert scheduler.counters.yielded_rows == 3


def test_a_heavier_client_has_more_rows_before_it_yields() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=8)
    runner = runner_for(scheduler)
    flood(scheduler, Client("a", 3), 20)
    step(scheduler, runner)
    flood(scheduler, Client("b"), 20)
    for _ in range(4):
        step(scheduler, runner)
    assert rows_of(scheduler) == {"a": 6, "b": 2}


def test_with_more_clients_than_rows_each_may_have_one_and_none_is_taken_from_who_has_one() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=3)
    runner = runner_for(scheduler)
    flood(scheduler, "a", 6)
    step(scheduler, runner)
    for client in "bcdefg":
        flood(scheduler, client, 2)
    step(scheduler, runner)
    assert rows_of(scheduler) == {"a": 1, "b": 1, "c": 1}
    run_all(scheduler, runner)
    assert scheduler.counters.yielded_rows == 2


def test_a_request_that_has_yielded_yields_again_only_when_it_is_twice_as_long() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=2, num_blocks=400, num_slots=400)
    runner = runner_for(scheduler)
    requests = flood(scheduler, "a", 2, max_tokens=150)
    step(scheduler, runner)
    lengths: dict[str, list[int]] = {"a0": [], "a1": []}
    for i in range(90):
        before = {request.request_id: request.num_preemptions for request in requests}
        if i % 3 == 0 and len(scheduler.queues.requests) == 2:
            scheduler.add(make_request(f"b{i}", 3, 1, client="b"))
        step(scheduler, runner)
        for request in requests:
            if request.num_preemptions > before[request.request_id]:
                lengths[request.request_id].append(request.num_tokens)
    assert sum(map(len, lengths.values())) > 2
    for yielded in lengths.values():
        assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(yielded))
    run_all(scheduler, runner)
    for request in requests:
        assert request.output_token_ids == continuation(request.prompt_token_ids, 150)


def test_a_lack_of_memory_makes_nobody_wait_for_one_above_its_share_either() -> None:
    scheduler = make_caching_scheduler("none", num_blocks=26, max_num_seqs=16)
    runner = runner_for(scheduler)
    flood(scheduler, "a", 8, max_tokens=40)
    while not scheduler.counters.preemptions:
        step(scheduler, runner)
    [one] = flood(scheduler, "b", 1, max_tokens=20)
    while one.finish_reason is None:
        step(scheduler, runner)
    assert one.num_preemptions <= 1
    assert scheduler.num_running + scheduler.num_waiting == 8, "all others are still at work"
    run_all(scheduler, runner)


def test_a_client_of_lower_priority_takes_no_row() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=2, policy="priority")
    runner = runner_for(scheduler)
    flood(scheduler, "a", 2)
    step(scheduler, runner)
    scheduler.add(make_request("b0", client="b", priority=1))
    assert names(step(scheduler, runner)) == {"a0", "a1"}
    run_all(scheduler, runner)
    assert scheduler.counters.yielded_rows == 0


def test_no_step_is_scheduled_ahead_of_one_after_which_a_row_is_yielded() -> None:
    scheduler = make_caching_scheduler(max_num_seqs=2)
    scheduler.choose_drafts = None
    runner = runner_for(scheduler)
    flood(scheduler, "a", 3)
    step(scheduler, runner)
    batch = scheduler.schedule()
    scheduler.add(make_request("b0", client="b"))
    assert scheduler.schedule_ahead() is None
    assert scheduler.counters.steps_not_ahead[OverlapBlocker.ADMISSION] == 1
    scheduler.update(runner.run(batch) if batch.rows else answer(batch))
    assert "b0" in names(step(scheduler, runner))
    run_all(scheduler, runner)


def run_program(seed: int) -> Harness:
    """Three clients of different weights come and go, in memory that holds little more than the rows."""
    rng = random.Random(seed)
    limits = SchedulerLimits(rng.randint(1, 5), rng.randint(8, 16), 48, rng.random() < 0.7)
    sizes = Sizes(rng.randint(10, 30), rng.randint(5, 14), rng.choice([2, 3, 4]), 24, 8)
    clients = [Client("a", rng.choice([1, 2])), Client("b"), Client("c"), None]
    make = rng.choice([Harness, AheadHarness])
    harness = make_harness(limits, sizes, rng.choice(KINDS), 0, rng.choice, make=make)
    for _ in range(80):
        if harness.batch is None and (rng.random() < 0.3 or not harness.followers):
            client = rng.choice(clients)
            for _ in range(rng.choice([1, 1, 6])):
                prompt = [*rng.choice(PIECES), *rng.choice(PIECES)]
                harness.arrive(Wish(prompt, StopConditions(rng.randint(1, 20)), client=client))
        elif harness.batch is None:
            harness.schedule()
        else:
            if isinstance(harness, AheadHarness) and harness.following is None:
                harness.follow()
            if rng.random() < 0.05:
                harness.end(rng.choice(sorted(harness.followers)), FinishReason.ABORT)
            harness.update()
    harness.finish_all()
    return harness


@pytest.mark.parametrize("part", range(2))
@pytest.mark.slow
def test_whoever_yields_gets_the_same_tokens_and_nothing_leaks(part: int) -> None:
    counters = [run_program(seed).scheduler.counters for seed in range(60 * part, 60 * part + 60)]
    assert sum(c.yielded_rows > 0 for c in counters) >= 15


@pytest.mark.parametrize("num_blocks", [16, 12, 20])
def test_a_request_that_makes_room_by_leaving_its_row_holds_up_none_behind_it(num_blocks: int) -> None:
    scheduler = make_caching_scheduler(max_num_seqs=4, num_blocks=num_blocks)
    runner = runner_for(scheduler)
    flood(scheduler, "a", 3)
    step(scheduler, runner)
    flood(scheduler, "b", 1)
    left = False
    while scheduler.has_unfinished:
        before = {request.request_id for request in scheduler.queues.running}
        batch = scheduler.schedule()
        running = [request.request_id for request in scheduler.queues.running]
        assert {row.request_id for row in batch.rows} == set(running)
        left = left or (before - {*running} != set() and running[-1:] == ["b0"])
        scheduler.update(runner.run(batch))
    assert left, "a request of the client with more rows has left, and the other client's stood behind it"
