"""Steps of a size that has a graph are preferred, where that makes no request wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.scheduler.scheduler import Scheduler
from tests.support.engines import make_engine as make_real_engine
from tests.support.fake_runner import continuation
from tests.support.scheduler_steps import make_request, make_scheduler, run_all, runner_for, step

MOST, GRAPH = 32, 24
"""Tokens of a step, and of the largest one that has a graph."""


def preferring(**limits: int) -> Scheduler:
    return make_scheduler(**{"max_num_batched_tokens": MOST, "graph_tokens": GRAPH, **limits})


def steps_of(scheduler: Scheduler) -> list[list[tuple[str, int]]]:
    """(request, tokens) of each row of each step, to the end."""
    runner = runner_for(scheduler)
    steps = []
    while scheduler.has_unfinished:
        steps.append([(name, tokens) for name, _, tokens in step(scheduler, runner)])
    return steps


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (24, [24]),
        (32, [32]),  # it fits, and would wait for a step more
        (33, [24, 9]),
        (48, [24, 24]),
        (49, [32, 17]),  # 24 and 24 would leave one token
        (64, [32, 32]),
        (72, [24, 24, 24]),
        (80, [32, 24, 24]),
        (81, [32, 32, 17]),
    ],
)
def test_a_prompt_that_does_not_fit_stops_at_the_size_of_a_graph_if_it_takes_no_more_steps(
    prompt: int, chunks: list[int]
) -> None:
    scheduler = preferring()
    scheduler.add(make_request("a", prompt, 1))
    assert steps_of(scheduler) == [[("a", chunk)] for chunk in chunks]


def test_without_a_preferred_size_every_step_is_filled() -> None:
    scheduler = preferring(graph_tokens=0)
    scheduler.add(make_request("a", 48, 1))
    assert steps_of(scheduler) == [[("a", 32)], [("a", 16)]]


def test_requests_that_decode_count_for_the_size_of_the_step() -> None:
    scheduler = preferring()
    runner = runner_for(scheduler)
    for name in "bc":
        scheduler.add(make_request(name, 3, 20))
    step(scheduler, runner)
    scheduler.add(make_request("a", 44, 1))
    assert [(name, tokens) for name, _, tokens in step(scheduler, runner)] == [("b", 1), ("c", 1), ("a", 22)]
    assert [(name, tokens) for name, _, tokens in step(scheduler, runner)] == [("b", 1), ("c", 1), ("a", 22)]


def test_a_prompt_does_not_wait_for_the_tokens_that_decoding_takes_from_later_steps() -> None:
    """Of a step with a graph nine others leave 15 tokens, so two of them hold 30; a full step has room for 23."""
    for prompt, chunks in ((30, [15, 15]), (31, [23, 8]), (38, [23, 15]), (39, [23, 16])):
        scheduler = preferring(max_num_seqs=16)
        runner = runner_for(scheduler)
        for name in "bcdefghij":
            scheduler.add(make_request(name, 1, 20))
        step(scheduler, runner)
        scheduler.add(make_request("a", prompt, 1))
        taken = [step(scheduler, runner)[-1], step(scheduler, runner)[-1]]
        assert [(name, tokens) for name, _, tokens in taken] == [("a", chunk) for chunk in chunks]


def test_steps_are_filled_up_while_somebody_else_has_a_prompt_to_be_computed() -> None:
    """He would begin in what is left of the step, so that it had the full size all the same."""
    scheduler = preferring()
    scheduler.add(make_request("a", 48, 1))
    scheduler.add(make_request("b", 8, 1))
    assert steps_of(scheduler) == [[("a", 32)], [("a", 16), ("b", 8)]]


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Limits, and (prompt, new tokens) of requests that are there at the start."""
    most = draw(st.integers(2, 40))
    limits = {
        "max_num_batched_tokens": most,
        "graph_tokens": draw(st.integers(1, most - 1)),
        "max_num_seqs": draw(st.integers(1, min(most, 8))),
    }
    requests = draw(st.lists(st.tuples(st.integers(1, 120), st.integers(1, 12)), min_size=1, max_size=8))
    return limits, requests


def first_tokens(limits: dict[str, int], requests: list[tuple[int, int]]) -> dict[str, int]:
    """Step in which each request got its first token. All get what they should."""
    scheduler = make_scheduler(num_blocks=1000, **limits)
    runner = runner_for(scheduler)
    made = [make_request(f"r{index}", prompt, new) for index, (prompt, new) in enumerate(requests)]
    for request in made:
        scheduler.add(request)
    first: dict[str, int] = {}
    number = 0
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        number += 1
        for update in scheduler.update(runner.run(batch)):
            first.setdefault(update.request_id, number)
    for request in made:
        assert request.output_token_ids == continuation(request.prompt_token_ids, len(request.output_token_ids))
    return first


@settings(max_examples=200, deadline=None)
@given(programs())
@pytest.mark.slow
def test_no_request_has_its_first_token_later_than_without_the_preference(
    program: tuple[dict[str, int], list[tuple[int, int]]],
) -> None:
    limits, requests = program
    assert first_tokens(limits, requests) == first_tokens({**limits, "graph_tokens": 0}, requests)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 150), st.integers(2, 40), st.data())
def test_a_prompt_alone_takes_no_more_steps(prompt: int, most: int, data: st.DataObject) -> None:
    graph = data.draw(st.integers(1, most - 1))
    scheduler = make_scheduler(max_num_batched_tokens=most, graph_tokens=graph)
    scheduler.add(make_request("a", prompt, 1))
    chunks = [tokens for [(_, tokens)] in steps_of(scheduler)]
    assert sum(chunks) == prompt
    assert len(chunks) == -(-prompt // most)
    # As many of them as can be have a graph.
    least = [chunk for chunk in chunks if chunk > graph]
    assert sum(least) == 0 or len(chunks) * graph < prompt


def test_preemption_and_scarce_blocks_change_no_token() -> None:
    scheduler = preferring(num_blocks=30)
    requests = [make_request(name, length, 20) for name, length in (("a", 48), ("b", 60), ("c", 9), ("d", 33))]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, runner_for(scheduler))
    assert scheduler.counters.preemptions > 0
    for request in requests:
        assert request.output_token_ids == continuation(request.prompt_token_ids, 20)


@pytest.mark.parametrize(
    ("chosen", "graph_tokens"),
    [
        ({"max_capture_size": 40}, 40),
        ({"max_capture_size": 40, "prefer_graph_sizes": False}, 0),
        ({"max_capture_size": 64}, 0),  # a step that is full has a graph
        ({"graph_mode": "full_decode_only"}, 0),
        ({"graph_mode": "none"}, 0),
        ({"capture_sizes": [1, 50, 90]}, 50),
    ],
)
def test_the_engine_prefers_its_largest_graph_unless_a_full_step_has_one(
    chosen: dict[str, object], graph_tokens: int
) -> None:
    engine = make_real_engine(max_num_batched_tokens=64, capture="lazy", **chosen)
    assert engine.scheduler.limits.graph_tokens == graph_tokens
