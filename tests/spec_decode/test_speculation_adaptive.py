"""Drafts in some steps and not in others: tokens, states and checkpoints stay the same, and drafts that do not pay are
left out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.checkpoints import random_prompt
from tests.support.engines import greedy
from tests.support.parity import NEW, add, check, decided_case, make_engine, run, run_with_preemptions, sampled_case
from tests.support.poison import poison
from tests.support.speculation import at_random, outputs_of, script

K, LENGTH = 3, 70

PROMPT = random_prompt(20, seed=1)

HEADS = ["nemotron_h_head", "nemotron_h_deep_head", "nemotron_h_stateless_head"]

GRAPHS: dict[str, dict[str, Any]] = {
    "none": {},
    "piecewise": {"capture_sizes": (16, 40)},
    "full_and_piecewise": {"capture_sizes": (16, 40), "capture_rows": (2, 4)},
}


@pytest.mark.parametrize("graph_mode", GRAPHS)
@pytest.mark.parametrize("name", HEADS)
def test_outputs_are_the_same_whichever_steps_have_drafts(name: str, graph_mode: str) -> None:
    """Of requests that are preempted, and of such as find what steps of both kinds have left in the cache. What nobody
    has written is NaN, in steps and in what check_replay compares."""
    first = sampled_case(name, LENGTH)
    turn = sampled_case(name, LENGTH + NEW + 13, (*first.prompt, *first.tokens))
    cases = [first, decided_case(name, 47), turn]
    generator = random.Random(len(name))
    engine = make_engine(
        name, speculative=f"mtp:{K}", graph_mode=graph_mode, state_cache_mode="all", max_num_batched_tokens=40,
        check_replay=True, **GRAPHS[graph_mode],
    )  # fmt: skip
    poison(engine)
    engine.scheduler.choose_drafts = lambda rows: generator.choice((0, 0, 0, K, K)) if rows else 0
    script(engine, outputs_of(cases), at_random(K), keep=True)
    outputs = [add(engine, case) for case in cases[:2]]
    run_with_preemptions(engine, outputs, (5, 14))
    outputs += [add(engine, case) for case in (first, turn)]
    run(engine)
    for case, output in zip((*cases[:2], first, turn), outputs, strict=True):
        check(case, output)
    assert engine.speculation is not None
    assert min(engine.speculation.counters.accepted) > 0


def test_drafts_that_do_not_pay_are_left_out_of_most_steps() -> None:
    engine = make_engine(HEADS[0], speculative=f"mtp:{K}", max_model_len=512)
    script(engine, {tuple(PROMPT): [0] * 480}, lambda row: (K, 0), keep=True)
    engine.add_request(PROMPT, greedy(max_tokens=480))
    run(engine)
    assert engine.speculation is not None
    steps = engine.speculation.counters.steps
    assert steps[0] > steps[K]
