"""Speculation holds no more than its write slots, and gives them back however a request ends; the engine counts what
became of its drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.core import EngineCore
from ostinato.scheduler.batch import Batch, StepResult
from tests.support.checkpoints import checkpoint
from tests.support.engines import assert_empty
from tests.support.parity import NEW, Case, add, check, decided_case, run, run_with_preemptions, sampled_case, shrink
from tests.support.speculation import Watched, drafting_engine

NAME, K = "nemotron_h_head", 3


def cases() -> list[Case]:
    return [sampled_case(NAME, 70), sampled_case(NAME, 61)]


def tight_engine(mode: str, **settings: Any) -> EngineCore:
    """Slots for two rows with all their drafts, and none besides."""
    engine = drafting_engine(NAME, f"mtp:{K}", state_cache_mode=mode, max_num_seqs=2, graph_mode="none", **settings)
    shrink(engine, num_blocks=40, num_slots=2 * (1 + K))
    return engine


# Freed slots


def finishes(engine: EngineCore) -> None:
    outputs = [add(engine, case) for case in cases()]
    run(engine)
    for case, output in zip(cases(), outputs, strict=True):
        check(case, output)


def stops_inside_a_window(engine: EngineCore) -> None:
    for case in cases():
        params = SamplingParams(**case.settings, max_tokens=NEW, stop_token_ids=case.tokens[20:21], min_tokens=15)
        engine.add_request(case.prompt, params)
    run(engine)


def is_aborted(engine: EngineCore) -> None:
    ids = [add(engine, case).request_id for case in cases()]
    for _ in range(9):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)


def is_preempted(engine: EngineCore) -> None:
    """It holds nothing while it waits, and loses nothing."""
    outputs = [add(engine, case) for case in cases()]
    for _ in range(9):
        engine.step()
    for output in outputs:
        assert engine.scheduler.preempt(output.request_id)
    usage = engine.stats()["cache"]
    assert usage["blocks_used"] == usage["slots_used"] == 0
    run(engine)
    for case, output in zip(cases(), outputs, strict=True):
        check(case, output)


def fails(engine: EngineCore) -> None:
    """In a step that has written already."""
    run_batch = engine.runner.execute

    def failing(batch: Batch) -> StepResult:
        result = run_batch(batch)
        if batch.num_drafts and batch.num_decode_rows == 2:
            raise RuntimeError("boom")
        return result

    engine.runner.execute = failing  # type: ignore[method-assign]
    outputs = [add(engine, case) for case in cases()]
    run(engine)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 2
    engine.runner.execute = run_batch  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("ends", [finishes, stops_inside_a_window, is_aborted, is_preempted, fails])
def test_all_slots_are_there_again_when_a_request(ends: Callable[[EngineCore], None], mode: str) -> None:
    engine = tight_engine(mode)
    for _ in range(2):
        ends(engine)
        assert_empty(engine)
    slots, index = engine.scheduler.cache.slots, engine.scheduler.cache.store.index
    assert slots.num_available == slots.capacity == 2 * (1 + K)
    assert slots.num_idle == len(list(index.checkpoints))
    # Both rows of a step can have all their drafts.
    watched = Watched(engine)
    finishes(engine)
    assert any([row.num_drafts for row in batch.rows] == [K, K] for batch, _ in watched.steps)


def test_a_request_never_holds_more_than_its_write_slots_its_checkpoint_and_its_trailing_one() -> None:
    engine = drafting_engine(NAME, f"mtp:{K}", state_cache_mode="align", graph_mode="none")
    outputs = [add(engine, case) for case in cases()]
    most = 0
    while engine.has_unfinished:
        engine.step()
        usage = engine.stats()["cache"]
        # Those that decoding has left behind are the index's, one for each request, and one more while a window's end
        # is not known.
        assert usage["slots_used"] <= len(outputs) * (2 + K)
        most = max(most, usage["slots_used"])
    assert most >= 2 * (1 + K)


# Statistics


STATISTICS = {
    "ngram": ("mamba2", lambda: f"ngram:{K}"),
    "mtp": (NAME, lambda: f"mtp:{K}"),
    "draft": ("llama", lambda: f"draft:{checkpoint('nemotron_h_dense')}:{K}"),
}


@pytest.mark.parametrize("method", STATISTICS)
def test_the_statistics_are_what_a_count_by_hand_gives(method: str) -> None:
    """Of prompts in chunks beside rows that decode, rows with fewer drafts than k, preempted requests and windows that
    the outputs' ends cut."""
    name, speculative = STATISTICS[method]
    engine = drafting_engine(name, speculative(), graph_mode="none", max_num_batched_tokens=40)
    watched = Watched(engine)
    outputs = [add(engine, case) for case in (sampled_case(name, 70), decided_case(name, 47), sampled_case(name, 61))]
    run_with_preemptions(engine, outputs, (4, 13))
    told = engine.stats()["speculation"]
    verdicts = watched.verdicts()
    with_drafts = {verdict: rows for verdict, rows in verdicts.items() if verdict[0]}
    assert len(with_drafts) > K + 1
    positions = [
        {
            "proposed": sum(rows for (given, _), rows in with_drafts.items() if given > i),
            "reached": sum(rows for (given, right), rows in with_drafts.items() if given > i and right >= i),
            "accepted": sum(rows for (_, right), rows in with_drafts.items() if right > i),
        }
        for i in range(K)
    ]
    for given, counted in zip(told["positions"], positions, strict=True):
        assert given == counted | {"acceptance": pytest.approx(counted["accepted"] / counted["reached"], abs=1e-4)}
    assert told["drafts_proposed"] == sum(given * rows for (given, _), rows in verdicts.items())
    assert told["drafts_accepted"] == sum(right * rows for (_, right), rows in verdicts.items())
    assert told["acceptance"] == pytest.approx(told["drafts_accepted"] / told["drafts_proposed"], abs=1e-4)
    assert told["rows_with_drafts"] == sum(with_drafts.values())
    assert told["tokens"] == sum((1 + right) * rows for (_, right), rows in verdicts.items())
    steps = [batch for batch, _ in watched.steps if batch.num_decode_rows]
    assert sum(told["steps"].values()) == len(steps)
    # Each output's tokens come from decode rows, but the first one and those behind a preemption's prompt.
    of_prompts = sum(
        len(row.token_ids) for batch, results in watched.steps for row in results.rows[batch.num_decode_rows :]
    )
    assert told["tokens"] + of_prompts == engine.stats()["generated_tokens"] == 3 * NEW


def test_a_prediction_head_without_graphs_of_its_own_takes_no_memory_for_them() -> None:
    llm = LLM("demo", graph_mode="piecewise", speculative="mtp:3", max_num_seqs=4, max_model_len=165, threads=1)
    assert llm.stats()["graphs"]["observed_bytes"] <= llm.plan.memory.graphs
