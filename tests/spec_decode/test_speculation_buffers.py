"""Three mistakes that full graphs, prefix caching and speculation invite together: too few columns for a row's write
slots, rows padded as if they were tokens, and a state read from where the step will write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ostinato.engine.core import EngineCore
from ostinato.ops.step_inputs import StepInputs
from ostinato.scheduler.batch import Batch, StepResult
from tests.support.checkpoints import checkpoint
from tests.support.graph_steps import without_padding
from tests.support.parity import Case, add, check, run, sampled_case
from tests.support.speculation import Watched, at_random, drafting_engine, outputs_of, script
from tests.support.tensors import as_tensor

K = 3
SPECULATIVE = {
    "ngram": lambda name: f"ngram:{K}",
    "mtp": lambda name: f"mtp:{K}",
    "draft": lambda name: f"draft:{checkpoint('mamba2')}:{K}",
}


def cases_of(name: str) -> list[Case]:
    return [sampled_case(name, length) for length in (70, 61, 47)]


def graph_engine(method: str = "mtp", **settings: object) -> EngineCore:
    """Prefix caching in mode all, full graphs, a model with a head."""
    name = "nemotron_h_dense_head"
    return drafting_engine(
        name,
        SPECULATIVE[method](name),
        state_cache_mode="all",
        max_num_batched_tokens=64,
        strict=True,
        capture="startup",
        **settings,
    )


def assert_right(engine: EngineCore, cases: Sequence[Case]) -> None:
    outputs = [add(engine, case) for case in cases]
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


# Columns


@pytest.mark.parametrize("method", SPECULATIVE)
def test_graphs_and_steps_have_a_column_for_each_write_slot(method: str) -> None:
    """The engine starts with every graph captured, and its first requests are right."""
    engine = graph_engine(method, max_num_seqs=3)
    graphs, steps = engine.runner.graphs, list[StepInputs]()
    assert engine.plan.capture.tokens_per_row == (1, 1 + K)
    assert graphs.buffers.tensors["write_slots"].shape == (3, engine.plan.memory.slots_per_request) == (3, 1 + K)
    keys = {(key.size, key.tokens_per_row) for key in graphs._graphs if key.mode == "full"}
    assert keys == {(rows, tokens) for rows in (1, 2, 3) for tokens in (1, 1 + K)}
    run_step = graphs.run

    def recorded(inputs: StepInputs) -> torch.Tensor:
        steps.append(without_padding(inputs))
        return run_step(inputs)

    graphs.run = recorded  # type: ignore[method-assign]
    assert_right(engine, cases_of("nemotron_h_dense_head"))
    assert {step.write_slots.shape[1] for step in steps} == {1, 1 + K}
    verifying = [step.write_slots for step in steps if step.write_slots.shape[1] > 1]
    assert any((slots > 0).all() and len(slots.unique()) == slots.numel() for slots in verifying)
    assert engine.runner.graphs.counts.to_json()["steps"]["full"] > 0


# Padding


def test_a_verify_batch_is_padded_by_rows_where_it_is_indexed_by_rows() -> None:
    """Three rows of four tokens in a graph of four rows, whose buffers held a step of other rows before."""
    engine = graph_engine(capture_rows=(4,), capture_sizes=(64,))
    graphs, padded = engine.runner.graphs, 0
    buffers, run_batch, run_step = graphs.buffers, engine.runner.execute, graphs.run
    tensors = {name: as_tensor(each) for name, each in buffers.tensors.items()}

    def dirtied(batch: Batch) -> StepResult:
        for name, buffer in tensors.items():
            used = buffer.shape[-1] if name != "block_tables" else max(map(len, buffers.written_tables))
            buffer[..., :used] = 3
        buffers.written_tables = [(3,) * used] * buffer.shape[0]  # the tables come last
        return run_batch(batch)

    def checked(inputs: StepInputs) -> torch.Tensor:
        nonlocal padded
        right = {name: as_tensor(getattr(inputs, name)).clone() for name in tensors}
        hidden = run_step(inputs)
        rows, width = inputs.write_slots.shape
        if inputs.num_decode_rows != rows or width == 1:
            return hidden
        assert hidden.shape[0] == 4 * width
        for name in ("read_slots", "write_slots", "kv_lens", "start_positions"):
            assert torch.equal(tensors[name][:rows], right[name])
            assert not tensors[name][rows:4].any()
        assert not tensors["block_tables"][rows:4].any()
        assert tensors["row_starts"][: 4 + 1].tolist() == [min(row, rows) * width for row in range(5)]
        for name in ("token_ids", "positions", "kv_cells"):
            assert torch.equal(tensors[name][: rows * width], right[name])
            assert not tensors[name][rows * width : 4 * width].any()
        padded += rows == 3
        return hidden

    engine.runner.execute, graphs.run = dirtied, checked  # type: ignore[method-assign]
    assert_right(engine, cases_of("nemotron_h_dense_head"))
    assert padded > 5


# Where the state is read


def scripted_engine(cases: Sequence[Case]) -> EngineCore:
    """Its drafts are right as far as chance wants."""
    engine = graph_engine()
    script(engine, outputs_of(cases), at_random(K), keep=True)
    return engine


def test_a_step_reads_its_state_where_the_last_one_wrote_that_of_the_last_accepted_token() -> None:
    cases = cases_of("nemotron_h_dense_head")
    engine = scripted_engine(cases)
    watched = Watched(engine)
    assert_right(engine, cases)
    moved = 0
    written: dict[str, int] = {}
    for batch, results in watched.steps:
        for row, result in zip(batch.rows, results.rows, strict=True):
            if row.request_id in written:
                assert row.read_slot == written[row.request_id]
                moved += row.read_slot != row.write_slots[0]
            num_accepted = max(len(result.token_ids) - 1, 0)
            written[row.request_id] = row.write_slots[num_accepted]
    assert moved > 20
    assert {accepted for _, accepted in watched.verdicts()} == set(range(1 + K))


def test_a_step_that_read_its_state_where_it_will_write_would_give_other_tokens() -> None:
    """So the test above, and those of parity, would see it."""
    cases = cases_of("nemotron_h_dense_head")
    engine = scripted_engine(cases)
    run_batch = engine.runner.execute

    def mistaken(batch: Batch) -> StepResult:
        rows = tuple(
            row._replace(read_slot=row.write_slots[0]) if i < batch.num_decode_rows else row
            for i, row in enumerate(batch.rows)
        )
        return run_batch(replace(batch, rows=rows))

    engine.runner.execute = mistaken  # type: ignore[method-assign]
    outputs = [add(engine, case) for case in cases]
    run(engine)
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids != case.tokens
