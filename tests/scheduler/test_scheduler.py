"""The scheduler, step by step: what it puts into a batch."""

from __future__ import annotations

import pytest

from ostinato.scheduler.batch import Batch, RowResult, StepResult
from ostinato.scheduler.limits import scored_tokens
from ostinato.scheduler.request import Request, StopConditions
from tests.support.fake_runner import FakeRunner, continuation
from tests.support.scheduler_steps import BLOCK, answer, make_request, make_scheduler, run_all, shape, step

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
    scheduler.update(answer(batch))


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


def test_requests_that_can_grow_no_further_need_no_spare_block() -> None:
    scheduler, runner = make_scheduler(num_blocks=5), FakeRunner(BLOCK)
    for name in "ab":
        scheduler.add(make_request(name, 2 * BLOCK - 1, max_tokens=2))
    assert step(scheduler, runner) == [("a", 0, 2 * BLOCK - 1), ("b", 0, 2 * BLOCK - 1)]
    assert scheduler.counters.preemptions == 0


def test_an_empty_scheduler_gives_an_empty_batch_that_needs_no_update() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() == Batch((), 0)
    assert scheduler.schedule() == Batch((), 0)
    assert scheduler.counters.steps == 0


def test_the_row_carries_the_payload_and_a_table_long_enough_for_its_tokens() -> None:
    scheduler, payload = make_scheduler(), object()
    scheduler.add(make_request("a", 9, sampling_state=payload))
    row = scheduler.schedule().rows[0]
    assert row.sampling_state is payload
    assert len(row.block_table) == 3


# Without chunked prefill


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler, runner = (
        make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False),
        FakeRunner(BLOCK),
    )
    scheduler.add(make_request("a", 5, max_tokens=2))
    scheduler.add(make_request("b", 8, max_tokens=2))
    assert [step(scheduler, runner) for _ in range(3)] == [[("a", 0, 5)], [("a", 5, 1)], [("b", 0, 8)]]


def test_without_chunked_prefill_a_preempted_request_that_outgrew_a_step_is_computed_again_in_chunks() -> None:
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


def test_a_step_scores_few_prompt_tokens_while_another_request_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, scored_tokens=20)
    runner = FakeRunner(BLOCK)
    scheduler.add(make_request("stream", 4, max_tokens=30))
    step(scheduler, runner)
    prompts = [make_request(name, 60, max_tokens=1, wants_prompt_logprobs=True) for name in "ab"]
    for request in prompts:
        scheduler.add(request)
    scored = list[list[int]]()
    updates = []
    while not all(request.output_token_ids for request in prompts):
        batch = scheduler.schedule()
        assert "stream" in [row.request_id for row in batch.rows], "a stream never waits for scores"
        scored.append([row.num_scored for row in batch.rows])
        updates += scheduler.update(runner.run(batch))
    # A request has a row in the step that admits it, and later ones where the step has scores left.
    assert scored[0] == [0, 20, 16]
    assert all(sum(row) <= 20 for row in scored[1:])
    assert sum(map(sum, scored)) == 2 * 59
    for request in prompts:
        given = [
            entry for update in updates if update.request_id == request.request_id for entry in update.prompt_logprobs
        ]
        assert [entry.token_id for entry in given] == list(request.prompt_token_ids[1:])


def test_prompts_are_scored_in_large_steps_while_nothing_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100, scored_tokens=20)
    scheduler.add(make_request("a", 60, wants_prompt_logprobs=True))
    scheduler.add(make_request("b", 60, wants_prompt_logprobs=True))
    assert [row.num_scored for row in scheduler.schedule().rows] == [59, 40]


@pytest.mark.parametrize(("vocab_size", "most"), [(768, 256), (2**16, 64), (151_936, 32)])
def test_fewer_prompt_tokens_are_scored_in_a_step_of_a_larger_vocabulary(vocab_size: int, most: int) -> None:
    assert scored_tokens(vocab_size) == most


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
