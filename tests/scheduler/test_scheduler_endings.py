"""How requests end: by their stop conditions, from outside, and when a step fails."""

from __future__ import annotations

import pytest

from ostinato.scheduler.batch import Batch, RowResult, StepResult, TokenLogprobs
from ostinato.scheduler.request import FinishReason, StopConditions
from tests.support.fake_runner import FakeRunner
from tests.support.scheduler_steps import BLOCK, answer, give, make_request, make_scheduler, run_all, step


def test_a_stop_token_ends_a_request_and_tokens_after_it_are_dropped_with_their_logprobs() -> None:
    scheduler = make_scheduler(k=2)
    request = make_request("a", stop=StopConditions(10, stop_token_ids=frozenset({7})))
    scheduler.add(request)
    give(scheduler, (4,))
    logprobs = tuple(TokenLogprobs(t, -1.0, 1) for t in (5, 7, 9))
    (update,) = give(scheduler, (5, 7, 9), logprobs=logprobs, num_drafts=2)
    assert (update.token_ids, update.logprobs) == ((5, 7), logprobs[:2])
    assert (update.finish_reason, update.stop_reason) == (FinishReason.STOP, 7)
    assert request.output_token_ids == [4, 5, 7]
    assert not scheduler.has_unfinished


def test_several_tokens_of_one_step_that_reach_max_tokens_end_the_request() -> None:
    scheduler = make_scheduler(k=2)
    scheduler.add(make_request("a", max_tokens=6))
    assert give(scheduler, (1,))[0].finish_reason is None
    assert give(scheduler, (2, 3, 4), num_drafts=2)[0].finish_reason is None
    (update,) = give(scheduler, (5, 6), num_drafts=1)
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ((5, 6), "length", None)


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


def test_a_row_with_an_error_ends_its_request_alone_and_frees_its_memory() -> None:
    scheduler, runner = make_scheduler(max_num_batched_tokens=8), FakeRunner(BLOCK)
    requests = [make_request("a", 5), make_request("b", 5)]
    for request in requests:
        scheduler.add(request)
    for name in "ba":
        batch, error = scheduler.schedule(), ValueError("no luck")
        good = runner.run(batch).rows
        rows = [RowResult(name, error=error) if row.request_id == name else row for row in good]
        updates = {update.request_id: update for update in scheduler.update(StepResult(tuple(rows)))}
        assert (updates[name].finish_reason, updates[name].error) == ("error", error)
        scheduler.check_integrity()
        assert scheduler.cache.request_ids() == {"a", "b"} - {r.request_id for r in requests if r.finish_reason}
    assert [len(request.output_token_ids) for request in requests] == [1, 0]
    assert not scheduler.has_unfinished
    assert scheduler.counters.failed_steps == 0


def test_a_result_that_does_not_match_the_batch_changes_nothing_and_the_step_can_be_failed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    requests = [make_request("a", 5), make_request("b", 5)]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    good = answer(batch).rows
    for rows in (
        good[:1],
        good[::-1],
        (RowResult("a"), good[1]),
        (good[0], RowResult("b", (3,))),
        (RowResult("a", (1,), logprobs=()), good[1]),
        (RowResult("a", (1,), error=ValueError()), good[1]),
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
