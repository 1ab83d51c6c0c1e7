"""Block tables from step to step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.inputs import BlockTables
from ostinato.schedule.batch import Row

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
