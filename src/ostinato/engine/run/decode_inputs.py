"""The inputs of steps that only decode, one token per row. Most steps are of these, and what a small model computes in
one takes few milliseconds: arrays and tensors are made once, and written in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ostinato.engine.run.block_tables import BlockTables
from ostinato.layers.step import StepInputs
from ostinato.schedule.batch import Row


class DecodeInputs:
    """Memory for the inputs of one step after the other; `takes_images` for a model that does."""

    def __init__(self, takes_images: bool = False) -> None:
        self.takes_images = takes_images
        self.block_tables = BlockTables()
        # By the shape of their block tables.
        self._steps: dict[tuple[int, int], StepInputs] = {}
        self._tables: Any = None  # the array in which these lie
        self._make_arrays(0)

    def of(self, rows: Sequence[Row], block_size: int) -> StepInputs:
        """The inputs of `rows`, which have one token each. Valid until the next call.

        Rows without blocks write to the null block.
        """
        count = len(rows)
        if count > self._numbers.shape[1]:
            self._make_arrays(count)
        tables = self.block_tables.of(rows)
        starts = [row.start for row in rows]
        self._ids[:, :count] = (
            [row.token_ids[0] for row in rows],
            starts,
            [_cell(row.block_table, row.start, block_size) for row in rows],
        )
        self._numbers[:, :count] = (
            starts,
            [start + 1 for start in starts],
            [row.read_slot for row in rows],
            [row.write_slots[0] for row in rows],
        )
        if self.takes_images:
            # Where a request is decoded, all that stand for images is behind it.
            deltas = [0 if row.rope is None else row.rope.delta for row in rows]
            self._rope_positions[:count] = (self._ids[1, :count] + deltas)[:, None]
        if tables.base is not self._tables:
            self._tables = tables.base
            self._steps.clear()
        key = (count, tables.shape[1])
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._make_step(count, tables)
        return step

    def _make_arrays(self, count: int) -> None:
        """Room for `count` rows."""
        self._ids = np.zeros((3, count), dtype=np.int64)  # token ids, positions and cells
        self._numbers = np.zeros((4, count), dtype=np.int32)  # start positions, context lengths, slots read and written
        self._row_starts = np.arange(count + 1, dtype=np.int32)
        if self.takes_images:
            self._rope_positions = np.zeros((count, 3), dtype=np.int64)
            self._media_cells = np.zeros(count, dtype=np.int64)
        self._steps.clear()

    def _make_step(self, count: int, tables: np.ndarray) -> StepInputs:
        token_ids, positions, kv_cells = torch.from_numpy(self._ids[:, :count])
        start_positions, kv_lens, read_slots, write_slots = torch.from_numpy(self._numbers[:, :count])
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            row_starts=torch.from_numpy(self._row_starts[: count + 1]),
            start_positions=start_positions,
            kv_lens=kv_lens,
            block_tables=torch.from_numpy(tables),
            kv_cells=kv_cells,
            read_slots=read_slots,
            write_slots=write_slots.unsqueeze(1),
            num_decode_rows=count,
            rope_positions=torch.from_numpy(self._rope_positions[:count]) if self.takes_images else None,
            media_cells=torch.from_numpy(self._media_cells[:count]) if self.takes_images else None,
        )


def _cell(table: Sequence[int], position: int, block_size: int) -> int:
    """Where the key and value of `position` go."""
    column, offset = divmod(position, block_size)
    return (table[column] if column < len(table) else 0) * block_size + offset
