"""The scheduler, step by step: what it puts into a batch, and what it makes of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ostinato.cache.manager import CacheManager
from ostinato.errors import RequestError
from ostinato.schedule.batch import Batch, RowResult, StepResult, TokenLogprobs
from ostinato.schedule.limits import SchedulerLimits
from ostinato.schedule.request import FinishReason, Request, RequestUpdate, StopConditions
from ostinato.schedule.scheduler import Scheduler

from .fake_runner import FakeRunner, continuation

BLOCK = 4


def make_scheduler(num_blocks: int = 100, num_slots: int = 100, **limits: Any) -> Scheduler:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 200, **limits}
    return Scheduler(SchedulerLimits(**values), CacheManager(num_blocks, num_slots, BLOCK))


def make_request(name: str, prompt: int | Sequence[int] = 3, max_tokens: int = 5, **fields: Any) -> Request:
    tokens = [token_at(name, i) for i in range(prompt)] if isinstance(prompt, int) else prompt
    stop = fields.pop("stop", StopConditions(max_tokens))
    if fields.get("wants_prompt_logprobs"):
        fields["payload"] = tokens
    return Request(name, tokens, stop, **fields)


def token_at(name: str, index: int) -> int:
    return (sum(map(ord, name)) * 7 + index * 11) % 50


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each row."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in batch.rows]


def step(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[str, int, int]]:
    batch = scheduler.schedule()
    scheduler.update(runner.run(batch))
    scheduler.check_integrity()
    return shape(batch)


def run_all(scheduler: Scheduler, runner: FakeRunner, limit: int = 1000) -> list[RequestUpdate]:
    updates = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return updates
        batch = scheduler.schedule()
        assert batch.num_tokens <= scheduler.limits.max_num_batched_tokens
        updates += scheduler.update(runner.run(batch))
        scheduler.check_integrity()
    raise AssertionError(f"requests are unfinished after {limit} steps")


def give(scheduler: Scheduler, *token_ids: Sequence[int], **fields: Any) -> list[RequestUpdate]:
    """Schedule a step and answer it with these tokens per row."""
    rows = scheduler.schedule().rows
    results = (RowResult(row.request_id, tuple(t), **fields) for row, t in zip(rows, token_ids, strict=True))
    return scheduler.update(StepResult(tuple(results)))


# What a step holds


def test_a_prompt_is_computed_then_one_token_per_step_until_max_tokens() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(BLOCK)
    request = make_request("a", 6, max_tokens=3)
    scheduler.add(request)
    assert [step(scheduler, runner) for _ in range(3)] == [[("a", 0, 6)], [("a", 6, 1)], [("a", 7, 1)]]
    assert request.output_token_ids == continuation(request.prompt_token_ids, 3)
    assert request.finish_reason == "length"
    assert not scheduler.has_unfinished
    assert scheduler.cache.usage().blocks_used == scheduler.cache.usage().slots_used == 0


def test_the_first_row_reads_no_state_and_later_rows_read_what_the_last_one_wrote() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=4), FakeRunner(BLOCK)
    scheduler.add(make_request("a", 7, max_tokens=3))
    slots = []
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        slots.append((batch.rows[0].read_slot, batch.rows[0].write_slots))
        scheduler.update(runner.run(batch))
    assert slots == [(0, (1,)), (1, (1,)), (1, (1,)), (1, (1,))]


def test_decode_rows_come_first_then_running_prompts_then_waiting_ones_within_the_token_budget() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=10), FakeRunner(BLOCK)
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 15))
    scheduler.add(make_request("c", 3))
    assert step(scheduler, runner) == [("a", 0, 4), ("b", 0, 6)]
    assert step(scheduler, runner) == [("a", 4, 1), ("b", 6, 9)]
    batch = scheduler.schedule()
    assert shape(batch) == [("a", 5, 1), ("b", 15, 1), ("c", 0, 3)]
    assert batch.num_decode_rows == 2


def test_the_last_token_of_a_prompt_in_chunks_is_a_decode_row_and_a_first_token_is_not() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", 5))
    scheduler.add(make_request("b", 1))
    assert scheduler.schedule().num_decode_rows == 0
    scheduler.update(StepResult((RowResult("a"),)))
    batch = scheduler.schedule()
    assert shape(batch) == [("a", 4, 1), ("b", 0, 1)]
    assert batch.num_decode_rows == 1
    assert all(row.samples and row.num_logits == 1 for row in batch.rows)
    scheduler.update(runner_result(batch))


def runner_result(batch: Batch) -> StepResult:
    return StepResult(tuple(RowResult(row.request_id, (1,) if row.samples else ()) for row in batch.rows))


def test_a_prompt_chunk_that_is_not_the_last_has_no_logits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", 6))
    row = scheduler.schedule().rows[0]
    assert (row.num_logits, row.samples) == (0, False)


def test_at_most_max_num_seqs_requests_run() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=2), FakeRunner(BLOCK)
    for name in "abc":
        scheduler.add(make_request(name, 2, max_tokens=2))
    assert step(scheduler, runner) == [("a", 0, 2), ("b", 0, 2)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert step(scheduler, runner) == [("a", 2, 1), ("b", 2, 1)]
    assert step(scheduler, runner) == [("c", 0, 2)]


def test_a_step_never_exceeds_its_tokens_even_when_more_requests_are_decoding() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=2), FakeRunner(BLOCK)
    requests = [make_request(name, 1, max_tokens=6) for name in "abcd"]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, runner)
    assert all(r.output_token_ids == continuation(r.prompt_token_ids, 6) for r in requests)


def test_requests_are_served_in_order_of_arrival_whatever_their_priority_under_fcfs() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1), FakeRunner(BLOCK)
    for name, priority in (("a", 5), ("b", 0)):
        scheduler.add(make_request(name, 2, max_tokens=1, priority=priority))
    assert [step(scheduler, runner) for _ in range(2)] == [[("a", 0, 2)], [("b", 0, 2)]]


def test_lower_priority_values_are_served_first_and_equal_ones_by_arrival_under_priority() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1, policy="priority"), FakeRunner(BLOCK)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
        scheduler.add(make_request(name, 2, max_tokens=1, priority=priority))
    order = [step(scheduler, runner)[0][0] for _ in range(4)]
    assert order == ["d", "b", "a", "c"]


def test_nobody_overtakes_a_request_that_finds_no_memory() -> None:
    scheduler, runner = make_scheduler(num_blocks=7), FakeRunner(BLOCK)
    scheduler.add(make_request("a", 12, max_tokens=3))
    scheduler.add(make_request("b", 16, max_tokens=3))
    scheduler.add(make_request("c", 1, max_tokens=3))
    assert step(scheduler, runner) == [("a", 0, 12)]
    assert step(scheduler, runner) == [("a", 12, 1)]
    run_all(scheduler, runner)


def test_an_empty_scheduler_gives_an_empty_batch_that_needs_no_update() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() == Batch((), 0)
    assert scheduler.schedule() == Batch((), 0)
    assert scheduler.counters.steps == 0


def test_the_row_carries_the_payload_and_a_table_long_enough_for_its_tokens() -> None:
    scheduler, payload = make_scheduler(), object()
    scheduler.add(make_request("a", 9, payload=payload))
    row = scheduler.schedule().rows[0]
    assert row.payload is payload
    assert len(row.block_table) == 3


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


# Without chunked prefill


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler, runner = (
        make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False),
        FakeRunner(BLOCK),
    )
    scheduler.add(make_request("a", 5, max_tokens=2))
    scheduler.add(make_request("b", 8, max_tokens=2))
    assert [step(scheduler, runner) for _ in range(3)] == [[("a", 0, 5)], [("a", 5, 1)], [("b", 0, 8)]]


def test_without_chunked_prefill_a_preempted_request_that_outgrew_a_step_is_computed_again_in_chunks() -> (
    None
):
    scheduler, runner = (
        make_scheduler(num_blocks=8, max_num_batched_tokens=8, enable_chunked_prefill=False),
        FakeRunner(BLOCK),
    )
    first, second = make_request("a", 4, max_tokens=20), make_request("b", 4, max_tokens=20)
    scheduler.add(first)
    scheduler.add(second)
    run_all(scheduler, runner)
    assert second.num_preemptions == 1
    assert scheduler.counters.cut_recomputations == 1
    for request in (first, second):
        assert request.output_token_ids == continuation(request.prompt_token_ids, 20)


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
    scheduler.update(runner_result(batch))
    scheduler.add(make_request("a"))


# How a request ends


def test_a_stop_token_ends_a_request_and_tokens_after_it_are_dropped_with_their_logprobs() -> None:
    scheduler = make_scheduler()
    request = make_request("a", stop=StopConditions(10, stop_token_ids=frozenset({7})))
    scheduler.add(request)
    logprobs = tuple(TokenLogprobs(t, -1.0, 1) for t in (5, 7, 9))
    (update,) = give(scheduler, (5, 7, 9), logprobs=logprobs)
    assert (update.token_ids, update.logprobs) == ((5, 7), logprobs[:2])
    assert (update.finish_reason, update.stop_reason) == (FinishReason.STOP, 7)
    assert request.output_token_ids == [5, 7]
    assert not scheduler.has_unfinished


def test_several_tokens_of_one_step_are_cut_at_max_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=4))
    assert give(scheduler, (1, 2, 3))[0].finish_reason is None
    (update,) = give(scheduler, (4, 5, 6))
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ((4,), "length", None)


def test_an_end_of_sequence_token_stops_unless_it_is_ignored() -> None:
    for ignore, reason in ((False, "stop"), (True, None)):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", stop=StopConditions(9, 0, frozenset({8}), frozenset({7}), ignore)))
        assert give(scheduler, (7,))[0].finish_reason == reason
    assert give(scheduler, (8,))[0].finish_reason == "stop"


def test_a_stop_token_does_not_stop_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", stop=StopConditions(9, min_tokens=3, eos_token_ids=frozenset({7}))))
    assert [give(scheduler, (7,))[0].finish_reason for _ in range(3)] == [None, None, "stop"]


def test_a_stop_token_as_the_last_allowed_one_counts_as_a_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", stop=StopConditions(1, eos_token_ids=frozenset({7}))))
    assert give(scheduler, (7,))[0].finish_reason == "stop"


def test_a_request_ends_where_prompt_and_output_reach_max_model_len() -> None:
    scheduler, runner = make_scheduler(max_model_len=10), FakeRunner(BLOCK)
    request = make_request("a", 7, max_tokens=100)
    scheduler.add(request)
    run_all(scheduler, runner)
    assert (len(request.output_token_ids), request.finish_reason) == (3, "length")


def test_an_abort_frees_a_waiting_and_a_running_request_at_once() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=1), FakeRunner(BLOCK)
    scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    step(scheduler, runner)
    assert scheduler.abort("b")
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert not scheduler.abort("unknown")
    scheduler.check_integrity()
    assert scheduler.cache.usage().blocks_used == 0
    assert scheduler.counters.finished["abort"] == 2


def test_an_abort_in_flight_keeps_the_memory_until_the_step_is_over_and_ignores_its_result() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(BLOCK)
    aborted, other = make_request("a", 5), make_request("b", 5)
    scheduler.add(aborted)
    scheduler.add(other)
    batch = scheduler.schedule()
    scheduler.abort("a")
    scheduler.check_integrity()
    assert scheduler.cache.usage().slots_used == 2
    updates = scheduler.update(runner.run(batch))
    scheduler.check_integrity()
    assert [update.request_id for update in updates] == ["b"]
    assert (aborted.output_token_ids, aborted.finish_reason) == ([], "abort")
    assert scheduler.cache.usage().slots_used == 1


def test_a_request_finished_from_outside_keeps_the_reason_given() -> None:
    scheduler, runner = make_scheduler(), FakeRunner(BLOCK)
    request = make_request("a")
    scheduler.add(request)
    step(scheduler, runner)
    assert scheduler.finish("a", FinishReason.STOP)
    assert (request.finish_reason, len(request.output_token_ids)) == ("stop", 1)
    assert scheduler.cache.usage().blocks_used == 0


def test_a_failed_step_ends_its_requests_with_the_error_and_spares_the_others() -> None:
    scheduler, runner = make_scheduler(max_num_seqs=2), FakeRunner(BLOCK)
    requests = [make_request(name, 5) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    batch, error = scheduler.schedule(), ValueError("no luck")
    scheduler.abort("b")
    runner.fail(batch)
    (update,) = scheduler.fail(batch, error)
    assert (update.request_id, update.finish_reason, update.error) == ("a", "error", error)
    scheduler.check_integrity()
    assert scheduler.cache.usage().blocks_used == 0
    run_all(scheduler, runner)
    assert [request.finish_reason for request in requests] == ["error", "abort", "length"]
    assert scheduler.counters.failed_steps == 1


def test_a_result_that_does_not_match_the_batch_changes_nothing_and_the_step_can_be_failed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    requests = [make_request("a", 5), make_request("b", 5)]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    good = runner_result(batch).rows
    for rows in (
        good[:1],
        good[::-1],
        (RowResult("a"), good[1]),
        (good[0], RowResult("b", (3,))),
        (RowResult("a", (1,), logprobs=()), good[1]),
        (RowResult("a", (1,), prompt_logprobs=(TokenLogprobs(1, 0.0, 1),)), good[1]),
    ):
        with pytest.raises(AssertionError):
            scheduler.update(StepResult(rows))
        assert [request.num_computed_tokens for request in requests] == [0, 0]
        scheduler.check_integrity()
    assert len(scheduler.fail(batch, ValueError())) == 2


def test_no_step_is_scheduled_while_one_is_in_flight_and_only_that_one_can_fail() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="needs update"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.fail(Batch((), 0), ValueError())


# Prompt log-probabilities


def test_prompt_logprobs_are_delivered_once_for_every_prompt_token_but_the_first() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=4), FakeRunner(BLOCK)
    request = make_request("a", 10, max_tokens=2, wants_prompt_logprobs=True)
    scheduler.add(request)
    row = scheduler.schedule().rows[0]
    assert (row.num_logits, row.samples) == (4, False)
    updates = scheduler.update(runner.run(Batch((row,), 0)))
    updates += run_all(scheduler, runner)
    given = [entry.token_id for update in updates for entry in update.prompt_logprobs]
    assert given == list(request.prompt_token_ids[1:])
    assert [len(update.prompt_logprobs) for update in updates] == [4, 4, 1, 0]


def test_prompt_logprobs_given_before_a_preemption_are_not_given_again() -> None:
    scheduler, runner = make_scheduler(num_blocks=6, max_num_batched_tokens=3), FakeRunner(BLOCK)
    scheduler.add(make_request("a", 4, max_tokens=8))
    request = make_request("b", 12, max_tokens=2, wants_prompt_logprobs=True)
    scheduler.add(request)
    while request.num_preemptions == 0:
        given_before = request.num_prompt_logprobs
        step(scheduler, runner)
    assert 0 < given_before < 11
    updates = run_all(scheduler, runner)
    given = [entry.token_id for update in updates for entry in update.prompt_logprobs]
    assert given == list(request.prompt_token_ids[1 + given_before :])


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 1, wants_prompt_logprobs=True))
    assert scheduler.schedule().rows[0].num_logits == 1


# Tokens


def test_a_slice_of_tokens_crosses_from_the_prompt_into_the_output() -> None:
    request = Request("a", [1, 2, 3], StopConditions(9), output_token_ids=[4, 5, 6])
    everything = (1, 2, 3, 4, 5, 6)
    for start in range(7):
        for end in range(start, 7):
            assert request.tokens(start, end) == everything[start:end]
