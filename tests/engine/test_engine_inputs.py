"""Block tables and the inputs of decode steps, from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.buffers import StepBuffers
from ostinato.media.media_item import RopePositions
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.step_inputs import StepInputs
from ostinato.runner.inputs import make_step_inputs, write_step_inputs
from ostinato.scheduler.batch import Batch, BatchRow, MediaUse
from tests.support.media_cases import vision_spec

CPU = TorchArrays("cpu")
tables = st.lists(st.integers(1, 99), max_size=9).map(tuple)
steps = st.lists(st.lists(tables, min_size=1, max_size=5), min_size=1, max_size=6)


def rows_of(step: list[tuple[int, ...]]) -> list[BatchRow]:
    return [BatchRow(str(i), (0,), 0, table) for i, table in enumerate(step)]


@given(steps)
def test_nothing_of_an_earlier_step_is_left_in_the_tables(steps: list[list[tuple[int, ...]]]) -> None:
    buffers = StepBuffers(5, 5, 9, 1, CPU)
    for step in steps:
        buffers.write_tables([row.block_table for row in rows_of(step)])
        found = buffers.arrays["block_tables"]
        assert found.dtype == np.int32
        assert found[: len(step)].tolist() == [[*table, *[0] * (9 - len(table))] for table in step]


def test_a_table_that_stays_is_not_written_again() -> None:
    buffers, table = StepBuffers(2, 2, 2, 1, CPU), (3, 4)
    buffers.write_tables([table, (5, 6)])
    buffers.arrays["block_tables"][0] = 77
    buffers.write_tables([(3, 4), (8, 9)])
    assert buffers.arrays["block_tables"].tolist() == [[77, 77], [8, 9]]


BLOCK_SIZE = 4


@st.composite
def decode_rows(draw: st.DrawFn) -> BatchRow:
    start = draw(st.integers(1, 30))
    has_blocks = draw(st.booleans())
    table = tuple(draw(st.integers(1, 99)) for _ in range(start // BLOCK_SIZE + 1 if has_blocks else 0))
    slots = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    return BatchRow("a", (draw(st.integers(0, 999)),), start, table, slots[0], (slots[1], 77))


@given(st.lists(st.lists(decode_rows(), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_inputs_of_a_decode_step_hold_nothing_of_an_earlier_one(steps: list[list[BatchRow]]) -> None:
    kept = StepBuffers(5, 5, 8, 2, CPU)
    for rows in steps:
        inputs = write_step_inputs(kept, Batch(tuple(rows), num_decode_rows=len(rows)), BLOCK_SIZE)
        starts = [row.start for row in rows]
        width = 8
        assert inputs.token_ids.tolist() == [row.token_ids[0] for row in rows]
        assert inputs.positions.tolist() == inputs.start_positions.tolist() == starts
        assert inputs.row_starts.tolist() == list(range(len(rows) + 1))
        assert inputs.kv_lens.tolist() == [start + 1 for start in starts]
        assert inputs.block_tables.tolist() == [[*r.block_table, *[0] * (width - len(r.block_table))] for r in rows]
        assert inputs.kv_cells.tolist() == [
            (row.block_table[row.start // 4] if row.block_table else 0) * 4 + row.start % 4 for row in rows
        ]
        assert inputs.read_slots.tolist() == [row.read_slot for row in rows]
        assert inputs.write_slots.tolist() == [[row.write_slots[0]] for row in rows]
        assert (inputs.num_decode_rows, inputs.checkpoints) == (len(rows), ())
        dtypes = (inputs.token_ids.dtype, inputs.kv_cells.dtype, inputs.kv_lens.dtype, inputs.write_slots.dtype)
        assert dtypes == (torch.int64, torch.int64, torch.int32, torch.int32)


window_block_tables = st.tuples(st.integers(0, 5), st.lists(st.integers(1, 99), max_size=4)).map(
    lambda each: ((0,) * each[0] + tuple(each[1])) if each[1] else ()
)


@given(st.lists(st.lists(window_block_tables, min_size=1, max_size=5), min_size=1, max_size=6))
def test_window_block_tables_are_written_with_what_is_null_before_their_windows(
    steps: list[list[tuple[int, ...]]],
) -> None:
    buffers = StepBuffers(5, 5, 9, 1, CPU, max_window_blocks=9)
    for step in steps:
        buffers.write_window_tables(step)
        found = buffers.arrays["window_block_tables"]
        assert found[: len(step)].tolist() == [[*table, *[0] * (9 - len(table))] for table in step]


def test_a_layer_with_a_window_finds_its_keys_in_window_blocks_and_another_in_blocks() -> None:
    rows = (
        BatchRow("a", (5,), 9, (3, 4, 5), window_block_table=(0, 7, 8)),
        BatchRow("b", (1, 2, 3), 2, (6, 2), window_block_table=(9, 1)),
    )
    drafted = (rows[0]._replace(num_drafts=2, write_slots=(0,)),)
    for batch, drafts, blocks, window_blocks in (
        (Batch(rows[:1], 1), (), [5 * 4 + 1], [8 * 4 + 1]),
        (Batch(rows, 1), (), [21, 26, 27, 8], [33, 38, 39, 4]),
        (Batch(drafted, 1, 2), ((1, 2),), [21, 22, 23], [33, 34, 35]),
        (Batch(drafted, 1, 2), ((1,),), [21, 22, 0], [33, 34, 0]),
    ):
        buffers = StepBuffers(2, 6, 4, 3, CPU, max_window_blocks=4)
        inputs = write_step_inputs(buffers, batch, BLOCK_SIZE, drafts)
        for window, cells, table in (
            (None, blocks, rows[0].block_table),
            (8, window_blocks, rows[0].window_block_table),
        ):
            found, tables = inputs.kv_targets(window)
            assert found.tolist() == cells
            assert tables[0].tolist() == [*table, 0]
    plain = write_step_inputs(StepBuffers(2, 6, 4, 3, CPU), Batch(rows[:1], 1), BLOCK_SIZE)
    assert plain.kv_targets(8) == (plain.kv_cells, plain.block_tables)


def test_decode_steps_of_the_same_rows_lie_in_the_same_memory() -> None:
    kept = StepBuffers(1, 1, 2, 1, CPU)

    def written(start: int) -> StepInputs:
        return write_step_inputs(kept, Batch((BatchRow("a", (1,), start, (3, 5), 1, (1,)),), 1), BLOCK_SIZE)

    first, second = written(4), written(5)
    assert first is second
    assert first.positions.tolist() == [5]


def rope_of(length: int, delta: int) -> RopePositions:
    """Positions of a prompt that can be told from those of text: token i stands at (100 + i, 200 + i, 300 + i)."""
    return RopePositions(np.arange(length)[:, None] + [[100, 200, 300]], delta)


def images_of(*rows: BatchRow, num_decode_rows: int = 0, num_drafts: int = 0, drafts: Any = ()) -> tuple[Any, Any]:
    batch = Batch(rows, num_decode_rows, num_drafts)
    inputs = make_step_inputs(batch, BLOCK_SIZE, CPU, drafts, vision=vision_spec())
    assert inputs.rope_positions is not None
    assert inputs.media_cells is not None
    return inputs.rope_positions.tolist(), inputs.media_cells.tolist()


def test_tokens_of_images_have_cells_and_tokens_stand_where_the_request_has_them() -> None:
    """A chunk that begins within one image and ends within another one, between rows of text."""
    uses = (MediaUse(3, 6, (11, 12, 13)), MediaUse(7, 10, (5, 4, 3)))
    chunk = BatchRow("a", (1,) * 5, 4, (1, 2, 3), rope=rope_of(20, -3), media=uses)
    positions, cells = images_of(BatchRow("t", (1, 2), 6, (4, 5)), chunk, BatchRow("u", (1,), 2, (6,)))
    assert cells == [0, 0, 12, 13, 0, 5, 4, 0]
    assert positions == [[6] * 3, [7] * 3, *([100 + i, 200 + i, 300 + i] for i in range(4, 9)), [2] * 3]


def test_tokens_of_images_are_read_as_another_token_where_the_model_says_so() -> None:
    """As by Gemma 4's small embeddings; other tokens of that id stay."""
    row = BatchRow("a", (8, 9, 9, 9, 8), 4, (1, 2, 3), media=(MediaUse(3, 6, (11, 12, 13)), MediaUse(7, 8, (5,))))
    for text_token_id, expected in ((0, [0, 0, 9, 0, 8]), (None, [8, 9, 9, 9, 8])):
        vision = vision_spec(text_token_id=text_token_id)
        assert make_step_inputs(Batch((row,), 0), BLOCK_SIZE, CPU, vision=vision).token_ids.tolist() == expected


def test_what_follows_the_prompt_stands_at_its_position_and_an_offset() -> None:
    """Also where it is computed again together with the end of the prompt, and in steps that only decode."""
    again = BatchRow("a", (1,) * 5, 6, (1, 2, 3), rope=rope_of(8, -3))
    assert images_of(again)[0] == [[106, 206, 306], [107, 207, 307], [5] * 3, [6] * 3, [7] * 3]
    rows = BatchRow("a", (1,), 9, (1, 2, 3), rope=rope_of(8, -3)), BatchRow("t", (1,), 4, (4, 5))
    assert images_of(*rows, num_decode_rows=2) == ([[6] * 3, [4] * 3], [0, 0])


def test_drafts_stand_behind_their_token_and_padding_stands_somewhere() -> None:
    rows = (
        BatchRow("a", (1,), 9, (1, 2, 3, 4), rope=rope_of(8, -7), num_drafts=2),
        BatchRow("t", (1,), 4, (5, 6), num_drafts=2),
    )
    positions, cells = images_of(*rows, num_decode_rows=2, num_drafts=2, drafts=[(7, 8), (9,)])
    assert positions[:5] == [[2] * 3, [3] * 3, [4] * 3, [4] * 3, [5] * 3]
    assert min(positions[5]) >= 0
    assert cells == [0] * 6


@given(st.lists(st.lists(decode_rows(), min_size=1, max_size=5), min_size=1, max_size=6))
def test_positions_of_a_decode_step_hold_nothing_of_an_earlier_one(steps: list[list[BatchRow]]) -> None:
    kept = StepBuffers(5, 5, 8, 2, CPU, takes_images=True)
    for number, rows in enumerate(steps):
        rows = [row._replace(rope=rope_of(1, number + i)) if i % 2 else row for i, row in enumerate(rows)]
        inputs = write_step_inputs(kept, Batch(tuple(rows), len(rows)), BLOCK_SIZE)
        assert inputs.rope_positions is not None
        assert inputs.media_cells is not None
        expected = [[row.start + (number + i if i % 2 else 0)] * 3 for i, row in enumerate(rows)]
        assert inputs.rope_positions.tolist() == expected
        assert inputs.media_cells.tolist() == [0] * len(rows)
