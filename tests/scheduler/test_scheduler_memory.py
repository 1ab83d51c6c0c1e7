"""What the scheduler does where memory is short, and which requests it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.errors import RequestError
from ostinato.kv_cache.prefix_index import BlockHashes, IndexEntry, PrefixIndex
from ostinato.scheduler.request import Request
from tests.support.fake_runner import FakeRunner, continuation
from tests.support.scheduler_steps import (
    BLOCK,
    answer,
    make_caching_scheduler,
    make_request,
    make_scheduler,
    request_of,
    run_all,
    runner_for,
    step,
    text,
)

# Memory that runs short


def test_the_latest_arrived_is_preempted_keeps_its_outputs_and_computes_everything_again() -> None:
    scheduler, runner = make_scheduler(num_blocks=7), FakeRunner(BLOCK)
    first, second = make_request("a", 8, max_tokens=12), make_request("b", 7, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler, runner) == [("a", 0, 8), ("b", 0, 7)]
    while scheduler.counters.preemptions == 0:
        rows = step(scheduler, runner)
    assert [row[0] for row in rows] == ["a"]
    assert (second.num_preemptions, second.status, second.num_computed_tokens) == (1, "waiting", 0)
    kept = len(second.output_token_ids)
    assert kept > 0
    assert scheduler.counters.recomputed_tokens == 7 + kept - 1
    while ("b", 0, 7 + kept) not in rows:
        rows = step(scheduler, runner)
    run_all(scheduler, runner)
    assert first.output_token_ids == continuation(first.prompt_token_ids, 12)
    assert second.output_token_ids == continuation(second.prompt_token_ids, 8)


def test_the_lowest_priority_is_preempted_though_it_arrived_first() -> None:
    scheduler, runner = make_scheduler(num_blocks=7, policy="priority"), FakeRunner(BLOCK)
    low, high = make_request("low", 8, 12, priority=1), make_request("high", 7, 12, priority=0)
    scheduler.add(low)
    scheduler.add(high)
    run_all(scheduler, runner)
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    assert low.output_token_ids == continuation(low.prompt_token_ids, 12)


def test_a_preempted_request_runs_again_before_later_ones() -> None:
    scheduler, runner = make_scheduler(num_blocks=7), FakeRunner(BLOCK)
    for name, prompt, max_tokens in (("a", 8, 12), ("b", 7, 12), ("c", 1, 1)):
        scheduler.add(make_request(name, prompt, max_tokens))
    begun = []
    while scheduler.has_unfinished:
        begun += [name for name, start, _ in step(scheduler, runner) if start == 0]
    assert begun == ["a", "b", "b", "c"]


def test_one_that_waits_for_memory_is_looked_up_anew_only_when_there_is_more_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_caching_scheduler("none", num_blocks=20, num_slots=0)
    runner = runner_for(scheduler)
    looked: list[int] = []
    walk = PrefixIndex.walk

    def counted(index: PrefixIndex, block_hashes: BlockHashes, num_blocks: int) -> list[IndexEntry]:
        looked.append(scheduler.counters.steps)
        return walk(index, block_hashes, num_blocks)

    monkeypatch.setattr(PrefixIndex, "walk", counted)
    scheduler.add(make_request("short", 9, max_tokens=6))
    scheduler.add(make_request("long", 20, max_tokens=30))
    waiting = make_request("waiting", 50, max_tokens=2)
    scheduler.add(waiting)
    begun: dict[str, int] = {}
    while scheduler.has_unfinished:
        for name, _, _ in step(scheduler, runner):
            begun.setdefault(name, scheduler.counters.steps - 1)
    # At first, after the others' prompts, when the short one has ended, and when the long one has.
    assert looked == [0, 0, 0, 1, 6, begun["waiting"]]
    assert begun == {"short": 0, "long": 0, "waiting": 30}
    assert waiting.output_token_ids == continuation(waiting.prompt_token_ids, 2)


def test_one_that_waits_for_memory_begins_as_soon_as_it_can_share_what_another_has_computed() -> None:
    scheduler = make_caching_scheduler("none", num_blocks=18, num_slots=0)
    runner = runner_for(scheduler)
    scheduler.add(request_of("first", text(40), max_tokens=9))
    scheduler.add(request_of("second", text(43), max_tokens=2))
    assert step(scheduler, runner) == [("first", 0, 40)]
    assert step(scheduler, runner) == [("first", 40, 1), ("second", 40, 3)]
    run_all(scheduler, runner)


def test_a_request_preempted_between_steps_loses_its_memory_and_gives_the_same_tokens() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(BLOCK)
    request = make_request("a", 6, max_tokens=9)
    scheduler.add(request)
    for _ in range(3):
        step(scheduler, runner)
    assert scheduler.preempt("a")
    assert not scheduler.preempt("a")
    assert not scheduler.preempt("unknown")
    scheduler.check_integrity()
    assert scheduler.cache.usage().blocks_used == 0
    assert step(scheduler, runner) == [("a", 0, 9)]
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, 9)


def test_a_request_is_not_let_in_where_the_running_ones_need_the_last_blocks() -> None:
    scheduler, runner = make_scheduler(num_blocks=5), FakeRunner(BLOCK)
    scheduler.add(make_request("a", 8, max_tokens=9))
    scheduler.add(make_request("b", 8, max_tokens=9))
    assert step(scheduler, runner) == [("a", 0, 8)]
    run_all(scheduler, runner)
    assert scheduler.counters.preemptions == 0


def test_a_request_that_needs_the_whole_cache_is_served() -> None:
    scheduler, runner = make_scheduler(num_blocks=5, num_slots=2), FakeRunner(BLOCK)
    request = make_request("a", 10, max_tokens=7)
    scheduler.add(make_request("b", 9, max_tokens=7))
    scheduler.add(request)
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, 7)


def test_more_requests_than_slots_wait_for_a_slot() -> None:
    scheduler, runner = make_scheduler(num_slots=3), FakeRunner(BLOCK)
    for name in "abcd":
        scheduler.add(make_request(name, 2, max_tokens=3))
    assert len(step(scheduler, runner)) == 2
    run_all(scheduler, runner)


# Requests that are refused


@pytest.mark.parametrize(
    ("request_", "limits", "message"),
    [
        (make_request("a", 0), {}, "empty prompt"),
        (make_request("a", 1, max_tokens=0), {}, "max_tokens must be at least 1"),
        (make_request("a", 20), {"max_model_len": 20}, "shorten the prompt to 19 tokens"),
        (
            make_request("a", 33),
            {"enable_chunked_prefill": False},
            "turn enable_chunked_prefill on",
        ),
        (make_request("a", 13, max_tokens=9), {"num_blocks": 6}, "lower max_tokens to at most 8"),
        (make_request("a", 21, max_tokens=9), {"num_blocks": 6}, "shorten the prompt"),
        (make_request("a", 1), {"num_slots": 1}, "more memory"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_on_arrival(
    request_: Request, limits: dict[str, Any], message: str
) -> None:
    scheduler = make_scheduler(**limits)
    with pytest.raises(RequestError, match=message):
        scheduler.add(request_)
    assert not scheduler.has_unfinished
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("request_", "limits"),
    [
        (make_request("a", 19), {"max_model_len": 20}),
        (make_request("a", 32), {"enable_chunked_prefill": False}),
        (make_request("a", 13, max_tokens=8), {"num_blocks": 6}),
        (make_request("a", 20, max_tokens=1), {"num_blocks": 6}),
    ],
)
def test_a_request_at_the_limit_is_served(request_: Request, limits: dict[str, Any]) -> None:
    scheduler = make_scheduler(**limits)
    scheduler.add(request_)
    run_all(scheduler, FakeRunner(BLOCK))
    assert request_.finish_reason == "length"


def test_a_remedy_works() -> None:
    scheduler = make_scheduler(num_blocks=6)
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request("a", 13, max_tokens=9))
    (remedy,) = caught.value.remedies
    assert remedy.setting == "max_tokens"
    scheduler.add(make_request("a", 13, max_tokens=remedy.value))


def test_an_id_in_use_is_refused_and_is_free_again_when_its_request_and_its_step_are_over() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a"))
    batch = scheduler.schedule()
    scheduler.abort("a")
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a"))
    scheduler.update(answer(batch))
    scheduler.add(make_request("a"))
