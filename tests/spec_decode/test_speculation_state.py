"""What speculation leaves behind is what was accepted: blocks and checkpoints at boundaries inside verify windows hold
what plain steps leave there, the next turn goes on from them, and nothing is held for what was rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ostinato import SamplingParams
from ostinato.engine.core import EngineCore
from tests.support.checkpoints import checkpoint
from tests.support.parity import BLOCK, NEW, Case, add, cached, check, complete, run, sampled_case
from tests.support.speculation import Wanted, Watched, at_random, drafting_engine, outputs_of, script
from tests.support.tensors import as_tensor

LENGTH = 70


@dataclass(frozen=True)
class Method:
    """What makes drafts for a recipe. A draft model's are its own, all others are written for the test."""

    name: str
    method: str
    draft: str | None = None

    def engine(self, mode: str, k: int, draft: str | None = None, **settings: Any) -> EngineCore:
        """With checkpoints at every boundary in mode all. `draft`: by this model."""
        model = f"{checkpoint(draft or self.draft)}:" if self.draft else ""
        defaults = {"state_cache_mode": mode, "state_block_size": 16, "graph_mode": "none"}
        return drafting_engine(self.name, f"{self.method}:{model}{k}", **(defaults | settings))

    def write_drafts(self, engine: EngineCore, cases: Iterable[Case], wanted: Wanted) -> None:
        if self.method != "draft":
            script(engine, outputs_of(cases), wanted, keep=self.method == "mtp")


METHODS = {
    "of a hybrid": Method("nemotron_h", "ngram"),
    "of a model of states": Method("mamba2", "ngram"),
    "with a head": Method("nemotron_h_head", "mtp"),
    "with a head and no states": Method("nemotron_h_stateless_head", "mtp"),
    "with a draft model": Method("falcon_h1_normed", "draft", "nemotron_h_dense"),
}


def draft_when(engine: EngineCore, asked: Callable[[int], bool]) -> None:
    """Ask for drafts only in steps of which this is true of the position of the first request's next token."""
    scheduler, k = engine.scheduler, engine.plan.speculative.num_speculative_tokens  # type: ignore[union-attr]
    scheduler.choose_drafts = lambda rows: (
        k if scheduler.queues.running and asked(scheduler.queues.running[0].num_computed_tokens) else 0
    )


# What the index holds


def blocks_of(engine: EngineCore) -> dict[int, list[torch.Tensor]]:
    """{end of a block: its keys and values in every layer}; the index knows one text."""
    return {
        entry.end: [part[entry.block] for layer in engine.runner.layer_memory for part in (layer.k_cache, layer.v_cache)
                    if part is not None]
        for entry in engine.scheduler.cache.store.index
    }  # fmt: skip


def states_of(engine: EngineCore) -> dict[int, list[torch.Tensor]]:
    """{position of a checkpoint: its states in every layer}."""
    memory = engine.runner.layer_memory
    return {
        each.entry.end: [part[each.slot] for layer in memory for part in layer.states.values()]
        for each in engine.scheduler.cache.store.index.checkpoints
    }  # fmt: skip


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_and_checkpoints_hold_what_steps_without_drafts_leave_there(method: str, k: int) -> None:
    """In mode all, with a checkpoint at every boundary of the output, in windows of any number of right drafts or of so
    many that they pass two boundaries."""
    case = sampled_case(METHODS[method].name, LENGTH)
    engine, plain = (METHODS[method].engine("all", k) for _ in range(2))
    METHODS[method].write_drafts(engine, [case], at_random(k) if k < BLOCK else lambda row: (k, k))
    draft_when(plain, lambda position: False)
    watched = Watched(engine)
    for each in (engine, plain):
        complete(each, case)
    if k < BLOCK:
        assert {accepted for _, accepted in watched.verdicts()} == set(range(1 + k))
    elif METHODS[method].method != "draft":
        assert any((start + count) // BLOCK - start // BLOCK == 2 for start, count in windows(watched))
    boundaries = set(range(BLOCK, LENGTH + NEW, BLOCK))
    for parts_of in (states_of, blocks_of):
        given, expected = parts_of(engine), parts_of(plain)
        assert given.keys() == expected.keys() == boundaries
        for end, parts in expected.items():
            for own, wanted in zip(map(as_tensor, given[end]), map(as_tensor, parts), strict=True):
                torch.testing.assert_close(own, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0)


# The next turn


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("method", METHODS)
def test_the_next_turn_goes_on_from_a_boundary_anywhere_inside_a_window(method: str, mode: str) -> None:
    """Whether the window's first token ends before it, or its last. Only there are drafts, and all are right."""
    k, boundary = 3, 96
    end = boundary + 5  # so that the boundary is the last one, and nothing cuts the drafts
    name = METHODS[method].name
    first = sampled_case(name, LENGTH)
    turn = sampled_case(name, end + 4, (*first.prompt, *first.tokens)[:end])
    engine = METHODS[method].engine(mode, k, draft=name, max_num_seqs=5, cache_memory="64MiB")
    METHODS[method].write_drafts(engine, [first, turn], lambda row: (k, k))
    params = SamplingParams(**first.settings, max_tokens=end - LENGTH, ignore_eos=True)
    watched = Watched(engine)
    starts = range(boundary - k - 1, boundary + 1)
    for start in starts:
        draft_when(engine, lambda position, start=start: position == start)
        engine.add_request(first.prompt, params, cache_salt=f"{start}")
        run(engine)
        assert windows(watched) == {(start, 1 + k)}
        watched.steps.clear()
    outputs = [add(engine, turn, salt=f"{start}") for start in starts]
    run(engine)
    for output in outputs:
        check(turn, output)
        assert cached(output) == boundary


def windows(watched: Watched) -> set[tuple[int, int]]:
    """(position of a row's token, tokens that it gained) of the rows with drafts."""
    return {
        (row.start, len(result.token_ids))
        for batch, results in watched.steps
        for row, result in zip(batch.rows, results.rows, strict=True)
        if result.num_drafts
    }
