"""Prompts whose tokens see each other: no chunk cuts one, and only the same prompt finds its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ostinato.errors import RequestError
from ostinato.kv_cache.checkpoints import PrefixCachePolicy
from ostinato.kv_cache.manager import CacheManager
from ostinato.scheduler.batch import Batch
from ostinato.scheduler.limits import SchedulerLimits
from ostinato.scheduler.request import Request, StopConditions
from ostinato.scheduler.scheduler import Scheduler
from tests.support.scheduler_steps import BLOCK, answer, shape

TEXT = [*range(2, 2 + 5 * BLOCK)]


def make_scheduler(max_num_batched_tokens: int, graph_tokens: int = 0, caching: bool = True) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=200,
        enable_chunked_prefill=False,
        whole_prompts=True,
        graph_tokens=graph_tokens,
    )
    return Scheduler(limits, CacheManager(100, 0, BLOCK), PrefixCachePolicy(prefix_caching=caching, whole_prompts=True))


def request_of(name: str, tokens: Sequence[int], max_tokens: int = 1) -> Request:
    return Request(name, tokens, StopConditions(max_tokens))


def step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    scheduler.update(answer(batch))
    scheduler.check_integrity()
    return batch


def steps_of(scheduler: Scheduler, name: str) -> list[tuple[int, int]]:
    """(start, tokens) of the rows that a request gets until nothing is left."""
    rows = []
    while scheduler.has_unfinished:
        rows += [(start, count) for request_id, start, count in shape(step(scheduler)) if request_id == name]
    return rows


@pytest.mark.parametrize("other", [TEXT[:-1], [*TEXT, 1], TEXT[: 2 * BLOCK], [*TEXT[:-1], 1]])
def test_a_prompt_that_only_begins_alike_finds_nothing(other: list[int]) -> None:
    scheduler = make_scheduler(100)
    scheduler.add(request_of("r", TEXT))
    assert steps_of(scheduler, "r") == [(0, len(TEXT))]
    scheduler.add(request_of("other", other))
    assert steps_of(scheduler, "other") == [(0, len(other))]
    scheduler.add(request_of("again", TEXT))
    assert steps_of(scheduler, "again") == [(4 * BLOCK, BLOCK)]


def test_rows_know_where_their_prompt_ends() -> None:
    scheduler = make_scheduler(100)
    scheduler.add(request_of("r", TEXT))
    assert [row.prompt_end for row in step(scheduler).rows] == [len(TEXT)]


@pytest.mark.parametrize("graph_tokens", [0, len(TEXT) - 1])
def test_a_prompt_waits_for_a_step_with_room_for_all_of_it(graph_tokens: int) -> None:
    scheduler = make_scheduler(len(TEXT), graph_tokens)
    scheduler.add(request_of("first", [1], max_tokens=4))
    step(scheduler)
    scheduler.add(request_of("r", TEXT))
    assert [shape(step(scheduler)) for _ in range(3)] == [[("first", 1 + i, 1)] for i in range(3)]
    assert shape(step(scheduler)) == [("r", 0, len(TEXT))]


@pytest.mark.parametrize("graph_tokens", [0, len(TEXT) - 1])
def test_a_preempted_request_computes_its_prompt_whole_and_its_output_in_parts(graph_tokens: int) -> None:
    """It waits for a step without another request, which would leave room for all but one token of the prompt."""
    scheduler = make_scheduler(len(TEXT), graph_tokens, caching=False)
    scheduler.add(request_of("r", TEXT, max_tokens=12))
    step(scheduler)
    scheduler.add(request_of("other", [1], max_tokens=9))
    for _ in range(6):
        step(scheduler)
    scheduler.preempt("r")
    assert shape(step(scheduler)) == [("other", 6, 1)]
    (first, count), *others = steps_of(scheduler, "r")
    assert (first, count) == (0, len(TEXT))
    assert sum(tokens for _, tokens in others) + count == len(TEXT) + 11


def test_a_prompt_that_no_step_holds_is_refused_with_the_setting_to_raise() -> None:
    scheduler = make_scheduler(len(TEXT) - 1)
    message = f"see each other, so that it must be computed in one step .* raise max_num_batched_tokens to {len(TEXT)}"
    with pytest.raises(RequestError, match=message) as error:
        scheduler.add(request_of("r", TEXT))
    assert [(each.setting, each.value) for each in error.value.remedies] == [("max_num_batched_tokens", len(TEXT))]
