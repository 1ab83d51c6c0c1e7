"""The block tables of a step's rows, as an array that lives from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.schedule.batch import Row


class BlockTables:
    """The block tables of a step's rows as an array. A row whose table is the one of the last step costs nothing,
    however long it is: steps of long contexts would spend their time in copying."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), dtype=np.int32)
        self._tables: list[tuple[int, ...]] = []  # what stands in its rows

    def of(self, rows: Sequence[Row]) -> np.ndarray:
        """[rows, longest table] int32, at least one column, 0 behind each table. Valid until the next call."""
        width = max((len(row.block_table) for row in rows), default=0) or 1
        if len(rows) > self._array.shape[0] or width > self._array.shape[1]:
            shape = (max(len(rows), self._array.shape[0]), max(2 * width, self._array.shape[1]))
            self._array, self._tables = np.zeros(shape, dtype=np.int32), [()] * shape[0]
        for i, row in enumerate(rows):
            before, table = self._tables[i], row.block_table
            if table is not before:
                self._array[i, : len(table)] = table
                self._array[i, len(table) : len(before)] = 0
                self._tables[i] = table
        return self._array[: len(rows), :width]
