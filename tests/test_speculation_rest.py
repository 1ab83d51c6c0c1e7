"""While drafts rest, steps leave out what only drafts need; tokens, states and the model's own keys stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.engine.engine import Engine
from ostinato.models.nemotron_h.model import Head
from tests.checkpoints import random_prompt
from tests.engines import greedy
from tests.parity import (
    BLOCK,
    NEW,
    add,
    check,
    complete,
    decided_case,
    make_engine,
    run,
    run_with_preemptions,
    sampled_case,
)
from tests.speculation import at_random, outputs_of, script
from tests.test_speculation_state import blocks_of, states_of

K, LENGTH = 3, 70

PROMPT = random_prompt(20, seed=1)

HEADS = ["nemotron_h_head", "nemotron_h_deep_head", "nemotron_h_stateless_head"]

GRAPHS: dict[str, dict[str, Any]] = {
    "none": {},
    "piecewise": {"capture_sizes": (16, 40)},
    "full_and_piecewise": {"capture_sizes": (16, 40), "capture_rows": (2, 4)},
}


def resting_engine(name: str, graph_mode: str, choose: Callable[[], int | None], **settings: Any) -> Engine:
    """Drafts are as `choose` says before each step: how many, or None where they rest."""
    engine = make_engine(
        name, speculative=f"mtp:{K}", graph_mode=graph_mode, state_cache_mode="all", max_num_batched_tokens=40,
        **GRAPHS[graph_mode] | settings,
    )  # fmt: skip
    engine.scheduler._choose_drafts = lambda rows: choose() if rows else 0
    return engine


@pytest.mark.parametrize("graph_mode", GRAPHS)
@pytest.mark.parametrize("name", HEADS)
def test_outputs_are_the_same_whenever_drafts_rest(name: str, graph_mode: str) -> None:
    """Of requests that are preempted, and of such as find what steps of all kinds have left in the cache."""
    first = sampled_case(name, LENGTH)
    turn = sampled_case(name, LENGTH + NEW + 13, (*first.prompt, *first.tokens))
    cases = [first, decided_case(name, 47), turn]
    generator = random.Random(len(name))
    engine = resting_engine(name, graph_mode, lambda: generator.choice((None, None, 0, K, K)), check_replay=True)
    script(engine, outputs_of(cases), at_random(K), keep=True)
    outputs = [add(engine, case) for case in cases[:2]]
    run_with_preemptions(engine, outputs, (5, 14))
    outputs += [add(engine, case) for case in (first, turn)]
    run(engine)
    for case, output in zip((*cases[:2], first, turn), outputs, strict=True):
        check(case, output)
    assert engine.speculation is not None
    assert min(engine.speculation.counters.accepted) > 0


@pytest.mark.parametrize("graph_mode", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_rests_keeps_zeros_and_the_last_hidden_state(name: str, graph_mode: str) -> None:
    """In the blocks of what was decoded; all else is what steps leave there that do not rest."""
    case = decided_case(name, LENGTH)
    resting = resting_engine(name, graph_mode, lambda: None, state_block_size=16)
    awake = resting_engine(name, graph_mode, lambda: 0, state_block_size=16)
    for engine in (resting, awake):
        complete(engine, case)
    for parts_of in (states_of, blocks_of):
        given, expected = parts_of(resting), parts_of(awake)
        assert given.keys() == expected.keys() == set(range(BLOCK, LENGTH + NEW, BLOCK))
        num_of_head = 2 * num_attention_layers(resting) if parts_of is blocks_of else 0
        for end, parts in expected.items():
            first_decoded = max(0, LENGTH - (end - BLOCK))
            for number, (own, wanted) in enumerate(zip(given[end], parts, strict=True)):
                if number >= len(parts) - num_of_head:
                    assert not own[first_decoded:].any()
                    assert first_decoded >= BLOCK or wanted[first_decoded:].any()
                    own, wanted = own[:first_decoded], wanted[:first_decoded]
                torch.testing.assert_close(own, wanted, atol=1e-5, rtol=1e-4)


def num_attention_layers(engine: Engine) -> int:
    head = engine.runner.model.head
    assert isinstance(head, Head)
    return sum(block.kind == "attention" for block in head._blocks)


def test_a_graph_that_rests_makes_fewer_calls_and_is_captured_where_drafts_may_rest() -> None:
    for adaptive in ("on", "off"):
        engine = make_engine(HEADS[0], speculative=f"mtp:{K}", speculative_adaptive=adaptive, capture_rows=(2, 4))
        keys = [key for key in engine.runner.graphs.planned() if key.mode == "full"]
        resting = [key for key in keys if key.drafts_rest]
        assert [(key.size, key.tokens_per_row) for key in resting] == ([(4, 1), (2, 1)] if adaptive == "on" else [])
        graphs = engine.runner.graphs._graphs
        for key in resting:
            awake = next(each for each in keys if (each.size, each.tokens_per_row) == (key.size, 1))
            assert graphs[key].num_calls < graphs[awake].num_calls  # type: ignore[attr-defined]


def test_drafts_that_do_not_pay_rest_in_most_steps() -> None:
    engine = make_engine(HEADS[0], speculative=f"mtp:{K}", max_model_len=512)
    script(engine, {tuple(PROMPT): [0] * 480}, lambda row: (K, 0), keep=True)
    engine.add(PROMPT, greedy(max_tokens=480))
    rested = 0
    while engine.has_unfinished:
        engine.step()
        assert engine.speculation is not None
        rested += engine.speculation.controller.rests
    assert rested > 240
