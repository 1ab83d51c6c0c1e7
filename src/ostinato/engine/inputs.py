"""A batch as tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from ostinato.layers.step import StepInputs
from ostinato.schedule.batch import Batch, Row


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


def step_inputs(
    batch: Batch,
    block_size: int,
    device: torch.device,
    drafts: Sequence[Sequence[int]] = (),
    block_tables: BlockTables | None = None,
) -> StepInputs:
    """The kernels' view of `batch`. Models without blocks or slots get null ids there.

    `drafts` has the tokens proposed for each row, or nothing. If there are any, each decode row has the batch's
    `num_drafts` of them behind its own token, the last of which may be padding. With `block_tables`, those of the
    inputs are valid until the next step.
    """
    rows = batch.rows
    # NumPy, whose small operations cost a fraction of torch's.
    starts = np.array([row.start for row in rows], dtype=np.int64)
    tables = (block_tables or BlockTables()).of(rows)
    if batch.num_decode_rows == len(rows) and not any(drafts):
        return _decode_inputs(rows, tables, starts, block_size).to(device)
    counts = [len(each) for each in drafts] if any(drafts) else [0] * len(rows)
    width = 1 + batch.num_drafts if any(counts) else 1
    real = [len(row.token_ids) + count for row, count in zip(rows, counts, strict=True)]
    lengths = [width] * batch.num_decode_rows + real[batch.num_decode_rows :]
    token_ids: list[int] = []
    for i, row in enumerate(rows):
        token_ids += row.token_ids
        if counts[i]:
            token_ids += drafts[i]
        token_ids += [0] * (lengths[i] - real[i])
    row_starts = np.array([0, *itertools.accumulate(lengths)], dtype=np.int64)
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    offset = np.arange(len(token_ids)) - row_starts[row_of_token]
    positions = starts[row_of_token] + offset
    kv_cells = _kv_cells(tables, row_of_token, positions, block_size)
    if lengths != real:
        is_padding = offset >= np.array(real)[row_of_token]
        positions[is_padding] = kv_cells[is_padding] = 0
    inputs = StepInputs(
        token_ids=torch.from_numpy(np.array(token_ids, dtype=np.int64)),
        positions=torch.from_numpy(positions),
        row_starts=_int32(row_starts),
        start_positions=_int32(starts),
        kv_lens=_int32([row.end + count for row, count in zip(rows, counts, strict=True)]),
        block_tables=torch.from_numpy(tables),
        kv_cells=torch.from_numpy(kv_cells),
        read_slots=_int32([row.read_slot for row in rows]),
        write_slots=_int32(
            [_padded(row.write_slots[: 1 + count], width) for row, count in zip(rows, counts, strict=True)]
        ),
        num_decode_rows=batch.num_decode_rows,
        checkpoints=tuple(
            (i, position - row.start, slot) for i, row in enumerate(rows) for position, slot in row.checkpoints
        ),
    )
    return inputs.to(device)


def _decode_inputs(rows: Sequence[Row], tables: np.ndarray, starts: np.ndarray, block_size: int) -> StepInputs:
    """Of decode rows alone, which have one token each: most steps are of these."""
    row_of_token = np.arange(len(rows) + 1, dtype=np.int32)
    return StepInputs(
        token_ids=torch.from_numpy(np.array([row.token_ids[0] for row in rows], dtype=np.int64)),
        positions=torch.from_numpy(starts),
        row_starts=torch.from_numpy(row_of_token),
        start_positions=_int32(starts),
        kv_lens=_int32(starts + 1),
        block_tables=torch.from_numpy(tables),
        kv_cells=torch.from_numpy(_kv_cells(tables, row_of_token[:-1], starts, block_size)),
        read_slots=_int32([row.read_slot for row in rows]),
        write_slots=_int32([row.write_slots[:1] for row in rows]),
        num_decode_rows=len(rows),
    )


def logit_positions(batch: Batch, drafts: Sequence[Sequence[int]] = ()) -> list[int]:
    """Indices of the step's tokens whose logits are wanted: of each row's own tokens the trailing ones, and of all of
    its drafts. `drafts` as for `step_inputs`."""
    if batch.num_decode_rows == len(batch.rows) and not any(drafts):
        return list(range(len(batch.rows)))  # one token each, whose next is sampled
    wanted: list[int] = []
    has_drafts = any(drafts)
    start = 0
    for i, row in enumerate(batch.rows):
        end = start + len(row.token_ids)
        num_own = row.num_logits - row.num_drafts
        wanted.extend(range(end - num_own, end + (len(drafts[i]) if has_drafts else 0)))
        start = end + (batch.num_drafts if has_drafts and i < batch.num_decode_rows else 0)
    return wanted


def _padded(slots: tuple[int, ...], width: int) -> tuple[int, ...]:
    return slots + (0,) * (width - len(slots))


def _int32(values: Sequence[object] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))


def _kv_cells(tables: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """[tokens] int64: where each token's key and value go. Rows without blocks, and drafts beyond a row's blocks (which
    are padding), go to the null block."""
    column = np.minimum(positions // block_size, tables.shape[1] - 1)
    return tables[row_of_token, column].astype(np.int64) * block_size + positions % block_size
