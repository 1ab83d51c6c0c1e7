"""Block tables and the inputs of decode steps, from step to step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.block_tables import BlockTables
from ostinato.engine.decode_inputs import DecodeInputs
from ostinato.engine.inputs import step_inputs
from ostinato.schedule.batch import Batch, Row

tables = st.lists(st.integers(1, 99), max_size=9).map(tuple)
steps = st.lists(st.lists(tables, min_size=1, max_size=5), min_size=1, max_size=6)


def rows_of(step: list[tuple[int, ...]]) -> list[Row]:
    return [Row(str(i), (0,), 0, table) for i, table in enumerate(step)]


@given(steps)
def test_nothing_of_an_earlier_step_is_left_in_the_tables(steps: list[list[tuple[int, ...]]]) -> None:
    block_tables = BlockTables()
    for step in steps:
        found = block_tables.of(rows_of(step))
        width = max(1, *map(len, step), 1)
        assert found.dtype == np.int32
        assert found.tolist() == [[*table, *[0] * (width - len(table))] for table in step]


def test_a_table_that_stays_is_not_written_again() -> None:
    block_tables, table = BlockTables(), (3, 4)
    block_tables.of(rows_of([table, (5, 6)]))[0] = 77
    assert block_tables.of(rows_of([table, (8, 9)])).tolist() == [[77, 77], [8, 9]]


BLOCK_SIZE = 4


@st.composite
def decode_rows(draw: st.DrawFn) -> Row:
    start = draw(st.integers(1, 30))
    has_blocks = draw(st.booleans())
    table = tuple(draw(st.integers(1, 99)) for _ in range(start // BLOCK_SIZE + 1 if has_blocks else 0))
    slots = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    return Row("a", (draw(st.integers(0, 999)),), start, table, slots[0], (slots[1], 77))


@given(st.lists(st.lists(decode_rows(), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_inputs_of_a_decode_step_hold_nothing_of_an_earlier_one(steps: list[list[Row]]) -> None:
    kept = DecodeInputs()
    for rows in steps:
        batch = Batch(tuple(rows), num_decode_rows=len(rows))
        inputs = step_inputs(batch, BLOCK_SIZE, torch.device("cpu"), decode_inputs=kept)
        starts = [row.start for row in rows]
        width = max(1, *(len(row.block_table) for row in rows))
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


def test_decode_steps_of_the_same_rows_lie_in_the_same_memory() -> None:
    kept = DecodeInputs()
    first, second = (kept.of([Row("a", (1,), start, (3, 5), 1, (1,))], BLOCK_SIZE) for start in (4, 5))
    assert first is second
    assert first.positions.tolist() == [5]
