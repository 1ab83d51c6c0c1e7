"""How many drafts a row gets, and which memory it reads and writes with them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ostinato.kv_cache.checkpoints import StateCacheMode
from ostinato.kv_cache.manager import CacheManager
from ostinato.kv_cache.prefix_index import BlockHashes
from ostinato.scheduler.batch import Batch, RowResult, StepResult
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import FinishReason, Request, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, continuation
from tests.support.scheduler_steps import (
    BLOCK,
    make_caching_scheduler,
    make_request,
    make_scheduler,
    request_of,
    right_guesses,
    run_all,
    runner_for,
    serve,
    shape,
    step,
    text,
)

B = BLOCK


def started(scheduler: Scheduler, runner: FakeRunner, *requests: Request) -> None:
    """Add these requests and compute their prompts."""
    for request in requests:
        scheduler.add(request)
    step(scheduler, runner)
    assert all(len(request.output_token_ids) == 1 for request in requests)


def drafts_of(batch: Batch) -> list[tuple[str, int]]:
    """(request, drafts that it may get) of each row."""
    return [(row.request_id, row.num_drafts) for row in batch.rows]


def batches(scheduler: Scheduler, runner: FakeRunner) -> list[Batch]:
    """Those of all steps to the end."""
    run = []
    while scheduler.has_unfinished:
        run.append(scheduler.schedule())
        scheduler.update(runner.run(run[-1]))
        scheduler.check_integrity()
    return run


# What a step holds


def test_decode_rows_have_k_drafts_rows_of_prompts_none_and_all_of_them_count_for_the_budget() -> None:
    scheduler = make_scheduler(k=3, max_num_seqs=3, max_num_batched_tokens=16)
    runner = runner_for(scheduler)
    started(scheduler, runner, make_request("a", 4, 20), make_request("b", 4, 20))
    scheduler.add(make_request("c", 30, 20))
    batch = scheduler.schedule()
    assert (batch.num_decode_rows, batch.num_drafts, batch.num_tokens) == (2, 3, 16)
    assert drafts_of(batch) == [("a", 3), ("b", 3), ("c", 0)]
    assert shape(batch)[2] == ("c", 0, 8)
    assert [(row.samples, row.num_logits) for row in batch.rows] == [(True, 4), (True, 4), (False, 0)]
    assert [len(row.write_slots) for row in batch.rows] == [4, 4, 1]
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)


def test_the_number_of_drafts_is_chosen_anew_for_each_step_by_the_number_of_requests_that_decode() -> None:
    asked = []

    def choose(num_decoding: int) -> int:
        asked.append(num_decoding)
        return 2 if len(asked) % 2 else 0

    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=200)
    scheduler = Scheduler(limits, CacheManager(100, 100, B, 3), choose_drafts=choose)
    runner = runner_for(scheduler, right_guesses(2))
    started(scheduler, runner, make_request("a", 3, 13), make_request("b", 3, 13))
    scheduler.add(make_request("c", 3, 13))
    run = batches(scheduler, runner)
    # In the first step nobody decodes, but somebody waits, who might at once.
    assert asked == [1, 2, 3, 3, 3, 3, 3, 1]
    assert [batch.num_drafts for batch in run] == [0, 2, 0, 2, 0, 2, 0]
    rows = [row for batch in run for row in batch.rows if row.request_id == "a"]
    assert [len(row.write_slots) for row in rows] == [1, 3, 1, 3, 1, 3]
    # A step without drafts reads where the one before kept its last draft, and writes elsewhere.
    assert all(row.read_slot == before.write_slots[-1] for before, row in pairwise(rows))


def test_a_step_in_which_no_row_has_room_for_a_draft_has_one_token_per_row() -> None:
    scheduler = make_scheduler(k=3)
    started(scheduler, runner_for(scheduler), make_request("a", 4, 2), make_request("b", 4, 2))
    batch = scheduler.schedule()
    assert (batch.num_drafts, batch.num_tokens, drafts_of(batch)) == (0, 2, [("a", 0), ("b", 0)])


def test_a_prompt_of_which_all_but_the_last_token_is_cached_decodes_at_once_with_drafts() -> None:
    scheduler = make_caching_scheduler(k=3)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(3 * B + 1))
    scheduler.add(make_request("other", 9))
    request = request_of("same", text(3 * B + 1))
    scheduler.add(request)
    batch = scheduler.schedule()
    assert [(row.request_id, row.start, row.num_drafts) for row in batch.rows] == [("same", 3 * B, 3), ("other", 0, 0)]
    assert (batch.num_decode_rows, batch.num_drafts, batch.num_tokens) == (1, 3, 13)
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, 5)


def test_the_drafts_of_a_prompt_that_decodes_at_once_count_for_the_budget_of_the_step() -> None:
    scheduler = make_caching_scheduler(k=3, max_num_seqs=2, max_num_batched_tokens=12)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(2 * B + 1))
    scheduler.add(request_of("same", text(2 * B + 1)))
    scheduler.add(make_request("other", 20))
    batch = scheduler.schedule()
    assert shape(batch) == [("same", 2 * B, 1), ("other", 0, 8)]
    assert batch.num_tokens == 12
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)


@pytest.mark.parametrize(("prompt", "begins"), [(8, True), (9, False), (11, False), (12, False)])
def test_a_prompt_that_would_decode_at_once_waits_where_the_step_has_no_room_for_its_drafts(
    prompt: int, begins: bool
) -> None:
    scheduler = make_caching_scheduler(k=3, max_num_seqs=2, max_num_batched_tokens=12)
    runner = runner_for(scheduler)
    serve(scheduler, runner, text(2 * B + 1, seed=1))
    scheduler.add(request_of("first", text(prompt)))
    scheduler.add(request_of("second", text(2 * B + 1, seed=1)))
    batch = scheduler.schedule()
    assert ("second" in dict(drafts_of(batch))) == begins
    assert batch.num_tokens == (12 if begins else prompt)
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)


def test_a_result_with_more_drafts_or_tokens_than_the_row_may_have_is_refused() -> None:
    scheduler = make_scheduler(k=3)
    request = make_request("a", 4, 4)
    started(scheduler, runner_for(scheduler), request)
    assert drafts_of(scheduler.schedule()) == [("a", 2)]
    for num_tokens, num_drafts in ((0, 2), (4, 2), (2, 0), (1, 3)):
        with pytest.raises(AssertionError, match="request a"):
            scheduler.update(StepResult((RowResult("a", (1,) * num_tokens, num_drafts=num_drafts),)))
    scheduler.update(StepResult((RowResult("a", (1, 2, 3), num_drafts=2),)))
    assert (request.output_token_ids[1:], request.finish_reason) == ([1, 2, 3], "length")


# The text's end


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(7, 200), (100, 12)])
def test_drafts_are_clipped_at_max_tokens_and_at_max_model_len(max_tokens: int, max_model_len: int) -> None:
    scheduler = make_scheduler(k=4, max_model_len=max_model_len)
    runner = runner_for(scheduler, right_guesses(0))
    request = make_request("a", 5, max_tokens)
    scheduler.add(request)
    rows = [batch.rows[0] for batch in batches(scheduler, runner)]
    # The request may have 12 tokens, and the last one is never computed: positions 0 to 10 are.
    assert [(row.start, row.num_drafts) for row in rows] == [(0, 0), (5, 4), (6, 4), (7, 3), (8, 2), (9, 1), (10, 0)]
    assert max(len(row.block_table) for row in rows) == 3
    assert (request.output_token_ids, request.finish_reason) == (continuation(request.prompt_token_ids, 7), "length")


def test_a_stop_token_among_the_accepted_drafts_ends_the_request_there() -> None:
    prompt = text(5)
    output = continuation(prompt, 8)
    scheduler = make_scheduler(k=4)
    runner = runner_for(scheduler, right_guesses(4))
    request = Request("a", prompt, StopConditions(8, stop_token_ids=frozenset({output[3]})))
    started(scheduler, runner, request)
    (update,) = scheduler.update(runner.run(scheduler.schedule()))
    length = output.index(output[3]) + 1
    assert (list(update.token_ids), update.finish_reason) == (output[1:length], FinishReason.STOP)
    assert request.output_token_ids == output[:length]
    scheduler.check_integrity()


# Blocks


def test_with_blocks_for_the_known_tokens_alone_rows_get_fewer_drafts_and_nobody_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=3, num_slots=0, k=3)
    runner = runner_for(scheduler, right_guesses(0))
    requests = [make_request("a", 2, max_tokens=3), make_request("b", 1, max_tokens=4)]
    started(scheduler, runner, *requests)
    batch = scheduler.schedule()
    assert (drafts_of(batch), scheduler.cache.blocks.num_available) == ([("a", 1), ("b", 2)], 0)
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)
    assert scheduler.counters.preemptions == 0


def test_no_row_gets_a_block_for_drafts_before_every_row_has_that_of_its_token() -> None:
    scheduler = make_scheduler(num_blocks=4, num_slots=0, k=3)
    runner = runner_for(scheduler, right_guesses(0))
    started(scheduler, runner, make_request("a", 2, max_tokens=5), make_request("b", 4, max_tokens=4))
    batch = scheduler.schedule()
    assert [(len(row.block_table), row.num_drafts) for row in batch.rows] == [(1, 1), (2, 2)]
    assert scheduler.counters.preemptions == 0


def test_a_row_gets_as_many_drafts_as_there_are_blocks_for_though_it_may_have_more() -> None:
    scheduler = make_scheduler(num_blocks=4, num_slots=0, k=6)
    started(scheduler, runner_for(scheduler), make_request("a", 2, max_tokens=9), make_request("b", 2, max_tokens=9))
    # Of the three blocks each has one. The first could use two more, and gets the one that is left.
    assert [(len(row.block_table), row.num_drafts) for row in scheduler.schedule().rows] == [(2, 5), (1, 1)]


def test_blocks_for_drafts_are_given_back_before_anybody_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4, num_slots=0, k=2)
    runner = runner_for(scheduler, right_guesses(0))
    first, second = make_request("a", 2, max_tokens=5), make_request("b", 3, max_tokens=3)
    started(scheduler, runner, first, second)
    batch = scheduler.schedule()
    assert [(len(row.block_table), row.num_drafts) for row in batch.rows] == [(2, 2), (1, 0)]
    scheduler.update(runner.run(batch))
    batch = scheduler.schedule()
    assert [(row.request_id, len(row.block_table), row.num_drafts) for row in batch.rows] == [("a", 1, 0), ("b", 2, 0)]
    scheduler.update(runner.run(batch))
    run_all(scheduler, runner)
    assert scheduler.counters.preemptions == 0
    for request, count in ((first, 5), (second, 3)):
        assert request.output_token_ids == continuation(request.prompt_token_ids, count)


# Slots


def test_a_step_reads_the_state_from_where_the_step_before_wrote_it_for_the_last_token_kept() -> None:
    scheduler = make_scheduler(k=3)
    accepted_counts = [2, 0, 3, 1, 3, 0]
    runner = runner_for(scheduler, right_guesses(*accepted_counts))
    scheduler.add(make_request("a", 5, 1 + sum(1 + num_accepted for num_accepted in accepted_counts)))
    rows = [batch.rows[0] for batch in batches(scheduler, runner)]
    assert len(rows) == 1 + len(accepted_counts)
    assert rows[0].read_slot == 0
    for (before, row), num_accepted in zip(pairwise(rows), [0, *accepted_counts], strict=False):
        assert row.read_slot == before.write_slots[num_accepted]
    # Without a checkpoint no slot changes hands.
    assert all(row.write_slots == rows[1].write_slots[: 1 + row.num_drafts] for row in rows)


def test_a_step_that_follows_one_with_a_checkpoint_reads_that_and_writes_elsewhere() -> None:
    for num_accepted in range(4):
        scheduler = make_caching_scheduler(k=3, spacing=100)
        runner = runner_for(scheduler, right_guesses(num_accepted))
        # The first window ends at a boundary, if all its tokens are kept that the guess allows.
        request = make_request("a", 2 * B - 1 - num_accepted, 30)
        started(scheduler, runner, request)
        before = scheduler.schedule().rows[0]
        scheduler.update(runner.run(Batch((before,), 1, 3)))
        checkpoint = scheduler.cache.store.index.checkpoint_of(before.write_slots[num_accepted])
        assert checkpoint is not None
        assert checkpoint.entry.end == 2 * B
        row = scheduler.schedule().rows[0]
        assert row.read_slot == checkpoint.slot
        assert row.read_slot not in row.write_slots
        assert len(set(row.write_slots)) == 4


@pytest.mark.parametrize("k", [0, 1, 3])
def test_each_running_request_holds_its_slots_and_those_that_end_or_are_preempted_none(k: int) -> None:
    scheduler = make_scheduler(num_slots=41, k=k)
    runner = runner_for(scheduler)
    requests = [make_request(name, 5, 30) for name in "abcd"]
    started(scheduler, runner, *requests)
    step(scheduler, runner)
    held = []
    for end in (
        lambda: scheduler.preempt("d"),
        lambda: scheduler.abort("a"),
        lambda: scheduler.finish("b", FinishReason.STOP),
    ):
        held.append(scheduler.cache.usage().slots_used)
        assert end()
        scheduler.check_integrity()
    held.append(scheduler.cache.usage().slots_used)
    assert held == [4 * (1 + k), 3 * (1 + k), 2 * (1 + k), 1 + k]
    scheduler.preempt("c")
    assert (scheduler.cache.usage().slots_used, scheduler.cache.slots.num_free) == (0, 40)
    step(scheduler, runner)
    assert scheduler.cache.usage().slots_used == 2 * (1 + k)
    batch = scheduler.schedule()
    runner.fail(batch)
    scheduler.fail(batch, ValueError("the step broke down"))
    assert (scheduler.cache.usage().slots_used, scheduler.cache.slots.num_free) == (0, 40)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_with_a_prefix_cache_requests_that_end_or_are_preempted_leave_their_checkpoints_and_no_other_slot(
    mode: StateCacheMode,
) -> None:
    scheduler = make_caching_scheduler(mode, num_slots=61, k=3)
    runner = runner_for(scheduler)
    for name in "abc":
        scheduler.add(make_request(name, 11, 30))
    for _ in range(5):
        step(scheduler, runner)
    assert scheduler.preempt("c")
    assert scheduler.abort("b")
    run_all(scheduler, runner)
    usage, num_checkpoints = scheduler.cache.usage(), len(list(scheduler.cache.store.index.checkpoints))
    assert (usage.slots_used, usage.slots_cached) == (0, num_checkpoints)
    assert scheduler.cache.slots.num_free == 60 - num_checkpoints
    assert (num_checkpoints == 0) == (mode == "none")


@pytest.mark.parametrize(("num_slots", "num_drafts"), [(9, 2), (8, 2), (7, 1)])
def test_a_row_that_lacks_a_slot_has_a_draft_less_and_does_not_wait(num_slots: int, num_drafts: int) -> None:
    scheduler = make_caching_scheduler(num_slots=num_slots, spacing=100, k=2)
    runner = runner_for(scheduler, right_guesses(1))
    request = make_request("a", 2 * B - 2, 20)
    started(scheduler, runner, request)
    scheduler.update(runner.run(scheduler.schedule()))
    assert request.num_computed_tokens == 2 * B
    # Another one reads the checkpoint too, so that it cannot be taken over; three slots are its own.
    known = request.tokens(0, request.num_tokens)
    block_hashes = BlockHashes(B)
    block_hashes.extend(lambda start, end: known[start:end], len(known))
    cache = scheduler.cache
    assert cache.admit("other", len(known), cache.store.match(block_hashes, len(known) - 1))
    assert cache.request_cache("other").read_slot == cache.request_cache("a").read_slot
    batch = scheduler.schedule()
    (row,) = batch.rows
    assert (row.num_drafts, len(row.write_slots), batch.num_drafts) == (num_drafts, 1 + num_drafts, 2)
    scheduler.update(runner.run(batch))
    cache.free("other")
    run_all(scheduler, runner)
    assert request.output_token_ids == continuation(request.prompt_token_ids, 20)


# Preemption


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("kind", ["hybrid", "state", "attention"])
def test_a_request_preempted_after_drafts_were_kept_comes_back_to_the_same_tokens(
    mode: StateCacheMode, kind: str
) -> None:
    for num_accepted in range(1, 4):
        scheduler = make_caching_scheduler(
            "none" if kind == "attention" else mode,
            num_blocks=0 if kind == "state" else 100,
            num_slots=0 if kind == "attention" else 100,
            k=3,
        )
        runner = runner_for(scheduler, right_guesses(num_accepted))
        request = make_request("a", 7, 40)
        scheduler.add(request)
        while scheduler.has_unfinished:
            before = len(request.output_token_ids)
            step(scheduler, runner)
            if len(request.output_token_ids) - before == 1 + num_accepted:
                scheduler.preempt("a")
                scheduler.check_integrity()
                assert scheduler.cache.usage().slots_used == scheduler.cache.usage().blocks_used == 0
        assert request.num_preemptions >= 7
        assert request.output_token_ids == continuation(request.prompt_token_ids, 40)
