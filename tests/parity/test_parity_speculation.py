"""Speculation changes nothing: whoever makes the drafts, in every mode of the state cache, whether prompts come in
chunks, are preempted or hit, requests get the tokens and logits of transformers, greedy and sampled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import pytest

from ostinato.engine.core import EngineCore
from tests.support.checkpoints import checkpoint
from tests.support.parity import (
    BLOCK,
    add,
    cached,
    check,
    decided_case,
    has_state,
    run,
    run_with_preemptions,
    sampled_case,
)
from tests.support.recipes import HEADED, RECIPES
from tests.support.speculation import Watched, drafting_engine
from tests.support.turns import in_turns

LENGTH = 70
PREEMPT_AT = (3, 7, 11)
MODES = ("none", "align", "all")
GRAPHS: dict[str, dict[str, Any]] = {
    "none": {"max_num_batched_tokens": 37},
    "full_and_piecewise": {"max_num_batched_tokens": 61, "capture_sizes": (16, 61), "capture_rows": (2, 4)},
    "piecewise": {"max_num_batched_tokens": 61, "capture_sizes": (30, 61)},
    "full_decode_only": {"max_num_batched_tokens": 37, "capture_rows": (4,)},
}
"""Prompts come in chunks, rows and tokens are padded, and a graph holds any step that has one in the mode."""

SERVED_BY = {
    "none": {"eager"},
    "full_and_piecewise": {"full", "piecewise"},
    "piecewise": {"piecewise"},
    "full_decode_only": {"full", "eager"},
}

OTHER_DRAFTS = {
    "bamba": "llama",
    "falcon_h1": "mamba2",
    "granitemoehybrid_dense": "qwen3",
    "mamba2": "llama",
    "nemotron_h": "mamba2",
    "nemotron_h_dense": "falcon_h1_normed",
    "qwen3": "mamba2",
}
"""A second model of another architecture, `nemotron_h_dense` where none is named: one with states for a model that has
none, one with blocks for a model that has none, and one with both."""

VARIANTS = ("falcon_h1_normed", "granitemoehybrid_dense", "nemotron_h_dense")
"""Other settings of an architecture that has a recipe in every mode with every method."""


@dataclass(frozen=True)
class Cell:
    """One way of running a model. `method`: `ngram`, `mtp`, or `draft` by the model itself or another."""

    name: str
    mode: str
    method: str
    k: int
    graph_mode: str

    @property
    def speculative(self) -> str:
        if self.method in ("ngram", "mtp"):
            return f"{self.method}:{self.k}"
        draft = self.name if self.method == "itself" else OTHER_DRAFTS.get(self.name, "nemotron_h_dense")
        return f"draft:{checkpoint(draft)}:{self.k}"


def cells() -> Iterator[Cell]:
    """Every mode with every method, each with other numbers of drafts and graphs from one model to the next."""
    for number, name in enumerate(RECIPES):
        modes = MODES if has_state(name) else ("none",)
        pairs = list(itertools.product(modes, ("ngram", "itself", "other")))
        if name in VARIANTS:
            pairs = pairs[number % 3 :: 4]
        for i, (mode, method) in enumerate(pairs, number):
            yield Cell(name, mode, method, 1 + i % 4, tuple(GRAPHS)[(i // 2 + number) % 2])
    for number, name in enumerate(HEADED):
        for i, mode in enumerate(MODES, number):
            yield Cell(name, mode, "mtp", 1 + i % 4, tuple(GRAPHS)[i % 2])
    for graph_mode in ("piecewise", "full_decode_only"):
        yield Cell("nemotron_h_head", "all", "mtp", 3, graph_mode)
        yield Cell("mamba2", "align", "other", 2, graph_mode)
        yield Cell("llama", "none", "ngram", 3, graph_mode)


CELLS = in_turns(
    list(map(astuple, cells())),
    "drafts",
    always=lambda name, mode, method, k, graph_mode: method == "mtp" or graph_mode not in tuple(GRAPHS)[:2],
    mode=lambda name, mode, method, *others: (mode, method),
)


def serve(engine: EngineCore, cell: Cell) -> None:
    """Requests with a cold cache that are preempted, then some that find what these have left."""
    greedy, sampled = decided_case(cell.name, 47), sampled_case(cell.name, LENGTH)
    related = sampled_case(cell.name, LENGTH + 21, tuple(sampled.prompt[:50]))
    outputs = [add(engine, sampled), add(engine, greedy)]
    run_with_preemptions(engine, outputs, PREEMPT_AT)
    assert engine.scheduler.counters.preemptions >= 4
    outputs += [add(engine, related), add(engine, sampled)]
    run(engine)
    for case, output in zip((sampled, greedy, related, sampled), outputs, strict=True):
        check(case, output)
    common = 32 if engine.spec.keeps_state else 48  # of their 50 tokens: at a checkpoint, or in whole blocks
    hits = [common, LENGTH // BLOCK * BLOCK]
    assert [cached(output) for output in outputs[2:]] == ([0, 0] if has_no_hits(engine) else hits)


def has_no_hits(engine: EngineCore) -> bool:
    return engine.spec.keeps_state and engine.plan.settings.state_cache_mode == "none"


@pytest.mark.parametrize(("name", "mode", "method", "k", "graph_mode"), CELLS)
def test_tokens_and_their_logprobs_equal_transformers_with_speculation(
    name: str, mode: str, method: str, k: int, graph_mode: str
) -> None:
    cell = Cell(name, mode, method, k, graph_mode)
    engine = drafting_engine(
        cell.name, cell.speculative, state_cache_mode=cell.mode, graph_mode=cell.graph_mode, strict=True,
        **GRAPHS[cell.graph_mode],
    )  # fmt: skip
    watched = Watched(engine)
    serve(engine, cell)
    verdicts = watched.verdicts()
    if cell.method == "itself":
        assert all(accepted == given for given, accepted in verdicts)
        assert (cell.k, cell.k) in verdicts
    else:
        # None, all, and each number between; of four drafts one number may be left out by chance.
        seen = {accepted for given, accepted in verdicts if given == cell.k}
        assert {0, cell.k} <= seen
        assert len(seen) >= min(cell.k + 1, 4)
    counts = engine.stats()["graphs"]
    assert {mode for mode, steps in counts["steps"].items() if steps} == SERVED_BY[cell.graph_mode]
    assert counts["unplanned"] == 0


@pytest.mark.parametrize(
    ("name", "speculative"), [("nemotron_h_head", "mtp:3"), ("mamba2", "ngram:2"), ("falcon_h1", "draft:nemotron_h:2")]
)
@pytest.mark.parametrize("graph_mode", ["piecewise", "full_and_piecewise"])
def test_every_replay_of_a_verify_step_equals_the_eager_step(name: str, speculative: str, graph_mode: str) -> None:
    """In hidden states and in all slots that it writes; so do those of a head and of a draft model."""
    method, *draft, k = speculative.split(":")
    speculative = ":".join((method, *(str(checkpoint(each)) for each in draft), k))
    engine = drafting_engine(name, speculative, graph_mode=graph_mode, check_replay=True, **GRAPHS[graph_mode])
    cases = [sampled_case(name, LENGTH), decided_case(name, 47)]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    assert engine.stats()["speculation"]["drafts_accepted"] > 0


@pytest.mark.parametrize("settings", [{"enable_chunked_prefill": False}, {"block_size": 32}, {"max_num_seqs": 1}])
@pytest.mark.parametrize(("name", "k"), [("nemotron_h_head", 3), ("nemotron_h_stateless_head", 4)])
def test_other_settings_change_nothing_either(name: str, k: int, settings: dict[str, Any]) -> None:
    engine = drafting_engine(name, f"mtp:{k}", max_num_batched_tokens=150, capture_sizes=(150,), **settings)
    cases = [sampled_case(name, LENGTH), decided_case(name, 47)]
    for _ in range(2):
        outputs = [add(engine, case) for case in cases]
        run(engine)
        for case, output in zip(cases, outputs, strict=True):
            check(case, output)
    assert cached(outputs[0]) == 64
