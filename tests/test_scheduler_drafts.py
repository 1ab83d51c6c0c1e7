"""How many drafts a row gets, and which memory it reads and writes with them."""

from __future__ import annotations

from ostinato.schedule.request import Request
from ostinato.schedule.scheduler import Scheduler
from tests.fake_runner import FakeRunner, continuation
from tests.scheduler_steps import BLOCK, make_request, make_scheduler, right_guesses, run_all, runner_for, step

B = BLOCK


def started(scheduler: Scheduler, runner: FakeRunner, *requests: Request) -> None:
    """Add these requests and compute their prompts."""
    for request in requests:
        scheduler.add(request)
    step(scheduler, runner)
    assert all(len(request.output_token_ids) == 1 for request in requests)


# Drafts and blocks


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
