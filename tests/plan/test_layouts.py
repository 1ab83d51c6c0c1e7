"""Layouts: lengths of requests, steps between predicted ones, the simulated queue, and what engines carry."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError, Remedy
from ostinato.json_io import to_json_data
from ostinato.models.checkpoint import load_spec
from ostinato.ops.kernel_cost import StepShape
from ostinato.plan.capacity.estimate import (
    CapacityEstimate,
    Deadline,
    OfferedLoad,
    StepTimeTable,
    estimate_layouts,
    full_step,
)
from ostinato.plan.capacity.queue import Arrival, EngineCapacity, RequestLatency, make_arrivals, simulate
from ostinato.plan.device.gpu_catalogue import CATALOGUE
from ostinato.plan.plan import Plan, make_plan
from ostinato.plan.prediction import StepPredictor
from ostinato.plan.traffic import RequestLengths, Traffic
from tests.support.checkpoints import checkpoint

H100 = CATALOGUE["h100-80gb"]
LENGTHS = RequestLengths(Counter({20: 3, 60: 1}), Counter({5: 1, 17: 2}), 25)


def steps(rows: int, context: float, prompt_tokens: int = 0, before: float = 0) -> float:
    """A step of made times: no two kinds of work take as long. In whole parts of 4096, so that sums are exact and two
    ways of adding them up never differ."""
    of_context = round(2 * rows * context) / 2
    return (4096 + 1024 * rows + 4 * of_context + 205 * prompt_tokens + round(0.4 * prompt_tokens * before)) / 4096


# Lengths


def test_lengths_survive_their_file(tmp_path) -> None:
    lengths = RequestLengths()
    for prompt, output, cached in ((20, 5, 16), (20, 0, 16), (9, 1, 0)):
        lengths.count(prompt, output, cached)
    assert (lengths.num_requests, lengths.mean_prompt, lengths.mean_output) == (2, 14.5, 3.0)
    assert lengths.cached_share == 16 / 29
    traffic = Traffic({1: Counter({2: 3})}, Counter({7: 1}), lengths)
    traffic.save(tmp_path / "traffic.json")
    assert Traffic.load(tmp_path / "traffic.json") == traffic
    assert "requests" not in Traffic().to_json()
    alone = Traffic.from_json({"requests": {"prompt_tokens": {"8": 1}, "output_tokens": {"2": 4}}})
    assert alone.requests == RequestLengths(Counter({8: 1}), Counter({2: 4}))
    assert not alone.has_steps


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        ([], "is an object"),
        ({}, "nothing"),
        ({"prompt_tokens": {"8": 1}}, "its fields are"),
        ({"prompt_tokens": {"8": 1}, "output_tokens": {}}, "output_tokens counts no request"),
        ({"prompt_tokens": {"8": 0}, "output_tokens": {"1": 1}}, "prompt_tokens counts no request"),
        ({"prompt_tokens": {"0": 1}, "output_tokens": {"1": 1}}, "at least 1"),
        ({"prompt_tokens": {"8": 1}, "output_tokens": {"1": -1}}, "whole number"),
        (
            {"prompt_tokens": {"8": 1}, "output_tokens": {"1": 1}, "cached_tokens": 9},
            "at most what all prompts have, 8",
        ),
        ({"prompt_tokens": {"8": 1}, "output_tokens": {"1": 1}, "cached_tokens": True}, "at most"),
        ({"prompt_tokens": {"8": 1}, "output_tokens": {"1": 1}, "rate": 1}, "'rate'"),
    ],
)
def test_other_lengths_are_refused_with_the_field(requests: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Traffic.from_json({"requests": requests})


# Steps


@pytest.fixture(scope="module")
def machine() -> StepPredictor:
    spec = load_spec(EngineConfig(model=str(checkpoint("nemotron_h"))))
    return StepPredictor(spec, "bfloat16", "float32", 50e9, 500e9)


def test_steps_are_as_predicted_at_powers_of_two_and_between_them_lie_between(machine) -> None:
    times = StepTimeTable(machine)

    def predicted(rows: int, tokens: int, context: int, *, decodes: bool) -> float:
        return machine.predict(StepShape(rows, tokens, context, decodes)).seconds

    assert times.seconds(4, 512) == pytest.approx(predicted(4, 1, 512, decodes=True))
    assert times.seconds(0, 0, 64, 256) == pytest.approx(predicted(1, 64, 256, decodes=False))
    low, high = predicted(4, 1, 512, decodes=True), predicted(8, 1, 512, decodes=True)
    assert times.seconds(5, 512) == pytest.approx(low + (high - low) / 4)
    assert times.seconds(4, 640) == pytest.approx(
        (3 * predicted(4, 1, 512, decodes=True) + predicted(4, 1, 1024, decodes=True)) / 4
    )


@given(st.integers(1, 40), st.integers(0, 3000), st.integers(1, 900))
@settings(max_examples=60, deadline=None)
def test_a_step_of_rows_and_prompts_is_dearer_than_each_and_cheaper_than_both(machine, rows, context, prompt) -> None:
    times = StepTimeTable(machine).seconds
    both, apart = times(rows, context, prompt), (times(rows, context), times(0, 0, prompt))
    assert max(apart) * 0.97 <= both <= sum(apart) * 1.05


# The queue


def slowly(arrivals: list[Arrival], room: EngineCapacity) -> list[RequestLatency]:
    """The same queue, one step after the other, from its rules."""
    now, step, served = 0.0, 0, {}
    waiting = list(range(len(arrivals)))
    prompts: list[int] = []
    left = {place: each.computed for place, each in enumerate(arrivals)}
    made: dict[int, int] = {}
    first: dict[int, float] = {}
    while len(served) < len(arrivals):
        held = sum(arrivals[place].prompt + arrivals[place].output for place in [*prompts, *made])
        while waiting and arrivals[waiting[0]].time <= now and len(prompts) + len(made) < room.rows:
            tokens = arrivals[waiting[0]].prompt + arrivals[waiting[0]].output
            if room.cache_tokens is not None and held and held + tokens > room.cache_tokens:
                break
            held += tokens
            prompts.append(waiting.pop(0))
        if not prompts and not made:
            now = arrivals[waiting[0]].time
            continue
        budget, before, taken = room.step_tokens - len(made), 0, 0
        ended = []
        for place in prompts:
            part = min(budget - taken, left[place])
            if not taken:
                before = arrivals[place].prompt - left[place]
            left[place] -= part
            taken += part
            if not left[place] and part:
                ended.append(place)
        context = sum(arrivals[place].prompt + count for place, count in made.items())
        now += steps(len(made), context / len(made) if made else 0, taken, before)
        step += 1
        for place in made:
            made[place] += 1
        for place in ended:
            prompts.remove(place)
            made[place], first[place] = 1, now
        for place in [place for place, count in made.items() if count == arrivals[place].output]:
            del made[place]
            after = arrivals[place].output - 1
            served[place] = RequestLatency(
                first[place] - arrivals[place].time, (now - first[place]) / after if after else None
            )
    return [served[place] for place in range(len(arrivals))]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 30 * 4096).map(lambda n: n / 4096), st.integers(1, 40), st.floats(0, 1), st.integers(1, 12)
    ),
    min_size=1,
    max_size=12,
)


@given(ARRIVALS, st.integers(1, 4), st.integers(5, 30), st.none() | st.integers(30, 100))
@settings(max_examples=150, deadline=None)
def test_the_queue_is_that_of_its_rules_step_by_step(given_, rows, step_tokens, cache_tokens) -> None:
    made, time = [], 0.0
    for pause, prompt, share, output in given_:
        time += pause
        made.append(Arrival(time, prompt, max(1, round(prompt * share)), output))
    room = EngineCapacity(rows, step_tokens, cache_tokens)
    run = simulate(made, room, steps)
    for found, wanted in zip(run.served, slowly(made, room), strict=True):
        assert found.first_token == pytest.approx(wanted.first_token)
        assert found.per_token == (None if wanted.per_token is None else pytest.approx(wanted.per_token))
    assert 0 < run.busy <= run.seconds * (1 + 1e-9)
    assert 0 <= run.mean_rows <= rows


def test_a_single_row_waits_as_queueing_theory_says() -> None:
    # One row, one token each: an M/G/1 queue. Its mean wait is rate * E[S^2] / (2 (1 - load)) (Pollaczek, Khinchine).
    def seconds(rows: int, context: float, prompt_tokens: int = 0, before: float = 0) -> float:
        assert (rows, context, before) == (0, 0, 0)
        return 0.01 * prompt_tokens

    lengths = RequestLengths(Counter({10: 1, 100: 1}), Counter({1: 1}))
    arrivals = make_arrivals(lengths, 1.2, 40000, seed=1)
    served = simulate(arrivals, EngineCapacity(1, 1000, None), seconds).served
    service, squares = 0.55, (0.1**2 + 1.0**2) / 2
    wait = 1.2 * squares / (2 * (1 - 1.2 * service))
    assert statistics.fmean(each.first_token for each in served) == pytest.approx(service + wait, rel=0.06)


def test_arrivals_are_as_counted_and_repeat() -> None:
    arrivals = make_arrivals(LENGTHS, 5.0, 4000, seed=3)
    assert arrivals == make_arrivals(LENGTHS, 5.0, 4000, seed=3)
    assert arrivals[-1].time / 4000 == pytest.approx(0.2, rel=0.05)
    assert sum(each.prompt == 20 for each in arrivals) / 4000 == pytest.approx(0.75, abs=0.03)
    assert {each.computed for each in arrivals} == {round(20 * (1 - 25 / 120)), round(60 * (1 - 25 / 120))}


@pytest.mark.parametrize(
    "room", [EngineCapacity(8, 64, None), EngineCapacity(64, 24, None), EngineCapacity(64, 640, 400)]
)
def test_the_most_that_is_carried_is_where_the_queue_begins_to_grow(room: EngineCapacity) -> None:
    rows, seconds = full_step(LENGTHS, room, steps)
    most = rows / (LENGTHS.mean_output * seconds)

    def drained(rate: float) -> float:
        """Requests per second until all are served."""
        return 4000 / simulate(make_arrivals(LENGTHS, rate, 4000, seed=0), room, steps).seconds

    assert drained(3 * most) == pytest.approx(most, rel=0.1)
    assert drained(0.8 * most) == pytest.approx(0.8 * most, rel=0.06)


@pytest.mark.parametrize("room", [EngineCapacity(16, 64, None), EngineCapacity(64, 640, 3000)])
def test_the_most_that_is_carried_holds_where_few_outputs_are_much_longer_than_others(room: EngineCapacity) -> None:
    lengths = RequestLengths(Counter({20: 3, 60: 1}), Counter({4: 9, 400: 1}))
    drawn = make_arrivals(lengths, 1.0, 4000, seed=1)
    own = RequestLengths(Counter(each.prompt for each in drawn), Counter(each.output for each in drawn))
    rows, seconds = full_step(own, room, steps)
    at_once = [replace(each, time=0.0) for each in drawn]
    assert 4000 / simulate(at_once, room, steps).seconds == pytest.approx(rows / (own.mean_output * seconds), rel=0.05)


# Layouts


def estimate(
    per_second: float | None, deadline: Deadline | None = None, replicas: tuple[int, ...] = (), **given_: Any
) -> CapacityEstimate:
    config = EngineConfig(model="benchmarks/models/nemotron-h-8b", **given_)
    spec = load_spec(config)
    plan: Plan = make_plan(config, spec, H100)
    lengths = RequestLengths(Counter({500: 1, 1500: 1}), Counter({100: 1, 300: 1}), 500)
    return estimate_layouts(config, spec, H100, plan, OfferedLoad(lengths, per_second, deadline), replicas)


def test_the_fewest_replicas_carry_the_rate_and_one_less_does_not() -> None:
    found = estimate(100.0)
    (load,) = found.loads
    assert load.replicas == math.floor(100 / found.most_per_second) + 1 > 1
    assert load.share < 1
    (less,) = estimate(100.0, replicas=(load.replicas - 1,)).loads
    assert (less.first_token, less.per_token, less.rows, less.share >= 1) == (None, None, None, True)


@pytest.mark.slow
def test_a_deadline_takes_more_replicas_and_one_that_cannot_be_met_says_what_is_had() -> None:
    plain, strict = estimate(100.0), estimate(100.0, Deadline(0.1, 0.008))
    assert strict.loads[0].replicas > plain.loads[0].replicas
    assert strict.loads[0].in_time >= 0.99
    with pytest.raises(CapacityError, match=r"no number of replicas .* ms for its first token"):
        estimate(100.0, Deadline(1e-5, 1.0))


def test_more_load_is_waited_for_longer_and_each_load_repeats() -> None:
    found = estimate(None)
    assert [load.share for load in found.loads] == pytest.approx([0.5, 0.8, 0.9])
    for quantile in range(3):
        assert sorted(load.first_token[quantile] for load in found.loads) == [
            load.first_token[quantile] for load in found.loads
        ]
    assert found == estimate(None)
    assert found.is_lower_bound


def test_requests_that_are_too_long_and_rates_beyond_all_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="requests of 1800 tokens") as refused:
        estimate(1.0, max_model_len=1000)
    assert refused.value.remedies == (Remedy("max_model_len", 1800),)
    with pytest.raises(CapacityError, match="4,096"):
        estimate(1e6)


def test_the_estimate_is_plain_data() -> None:
    data = json.loads(json.dumps(to_json_data(estimate(None, replicas=(1, 2)))))
    assert [load["replicas"] for load in data["loads"]] == [1, 1, 1, 2, 2, 2]


def test_ranks_are_devices_too() -> None:
    alone, shared = estimate(None), estimate(None, tensor_parallel_size=2)
    assert [load.devices for load in alone.loads] == [1, 1, 1]
    assert [load.devices for load in shared.loads] == [2, 2, 2]
    assert alone.most_per_second < shared.most_per_second < 2.2 * alone.most_per_second
