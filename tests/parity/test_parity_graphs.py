"""Graphs change nothing: in every graph mode, whether requests come together, in chunks, are preempted or hit, they get
the tokens and logits of transformers, for every architecture."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from tests.support.checkpoints import RECIPES, random_prompt
from tests.support.engines import greedy
from tests.support.parity import (
    BLOCK,
    NEW,
    PROMPT,
    add,
    cached,
    check,
    complete,
    decided_case,
    has_state,
    make_engine,
    run,
    serve_one_by_one,
    warm,
)
from tests.support.turns import in_turns

GRAPH_MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
BUDGET = 64

ENGINES = [
    *((name, graph_mode, "auto") for name in RECIPES for graph_mode in GRAPH_MODES),
    *(
        (name, graph_mode, "align")
        for name in RECIPES
        if has_state(name)
        for graph_mode in ("piecewise", "full_and_piecewise")
    ),
]
"""Recipe, graph mode, mode of the state cache."""

CELLS = in_turns(ENGINES, "graphs", always=lambda name, *modes: modes == ("full_and_piecewise", "auto"))

SERVED_BY = {
    "none": {"eager"},
    "piecewise": {"piecewise"},
    "full_decode_only": {"full", "eager"},
    "full_and_piecewise": {"full", "piecewise"},
}
"""What all steps of the tests run as: a graph holds each of them, if the mode has such a graph."""


def graph_engine(name: str, graph_mode: str, **settings: Any) -> EngineCore:
    """Its graphs hold any step, the largest one with no token of padding."""
    return make_engine(
        name, graph_mode=graph_mode, max_num_batched_tokens=BUDGET, max_capture_size=BUDGET, strict=True, **settings
    )


@pytest.mark.parametrize(("name", "graph_mode", "cache_mode"), CELLS)
def test_tokens_and_their_logprobs_equal_transformers_in_every_graph_mode(
    name: str, graph_mode: str, cache_mode: str
) -> None:
    engine = graph_engine(name, graph_mode, state_cache_mode=cache_mode)
    first = decided_case(name, PROMPT)
    # Chunks, rows that join and leave, and rows that begin anew.
    serve_one_by_one(engine, [first, decided_case(name, 47), decided_case(name, 3)], preempt_at=(12, 40))
    assert engine.scheduler.counters.preemptions >= 4
    # Hits that end at a checkpoint, and the next turn of a conversation, which begins where this one ended.
    related = decided_case(name, 131, tuple(first.prompt[:96]))
    output = add(engine, related)
    again = add(engine, first)
    run(engine)
    check(related, output)
    check(first, again)
    assert cached(output) >= 64
    assert cached(again) == 144
    short = decided_case(name, 47)
    turn = decided_case(name, 47 + NEW + 13, (*short.prompt, *short.tokens))
    assert cached(complete(engine, turn)) == (47 + NEW - 1) // BLOCK * BLOCK
    counts = engine.stats()["graphs"]
    assert {mode for mode, steps in counts["steps"].items() if steps} == SERVED_BY[graph_mode]
    assert counts["unplanned"] == 0
    assert sum(counts["steps"].values()) == engine.stats()["steps"]


@pytest.mark.parametrize("graph_mode", ["piecewise", "full_and_piecewise"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_replay_equals_the_eager_step(name: str, graph_mode: str) -> None:
    """In hidden states and in the states of the slots, for rows of all kinds: with hits, with checkpoints, new ones,
    preempted ones."""
    engine = graph_engine(name, graph_mode, check_replay=True)
    prompt = random_prompt(PROMPT, seed=1)
    warm(engine, prompt[:70])
    run(engine)
    for number, length in enumerate((PROMPT, 80, 21, 1, 40)):
        engine.add_request(prompt[:length], greedy(max_tokens=10 + number), request_id=f"{number}")
        engine.step()
        if number == 3:
            engine.scheduler.preempt("1")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    assert len(outputs) >= 3
    assert engine.stats()["graphs"]["steps"]["eager"] == 0
