"""A batch as tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from ostinato.engine.run.decode_inputs import DecodeInputs
from ostinato.layers.step import StepInputs
from ostinato.schedule.batch import Batch, Row


def step_inputs(
    batch: Batch,
    block_size: int,
    device: torch.device,
    drafts: Sequence[Sequence[int]] = (),
    decode_inputs: DecodeInputs | None = None,
) -> StepInputs:
    """The kernels' view of `batch`. Models without blocks or slots get null ids there.

    `drafts` has the tokens proposed for each row, or nothing. If there are any, each decode row has the batch's
    `num_drafts` of them behind its own token, the last of which may be padding. With `decode_inputs`, where steps that
    only decode have theirs, the inputs are valid until the next step. It says whether the model takes images.
    """
    rows = batch.rows
    decode_inputs = decode_inputs or DecodeInputs()
    if batch.num_decode_rows == len(rows) and not any(drafts):
        return decode_inputs.of(rows, block_size).to(device)
    # NumPy, whose small operations cost a fraction of torch's.
    starts = np.array([row.start for row in rows], dtype=np.int64)
    tables = decode_inputs.block_tables.of(rows)
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
    rope_positions: torch.Tensor | None = None
    media_cells: torch.Tensor | None = None
    if decode_inputs.takes_images:
        rope_positions = torch.from_numpy(_rope_positions(rows, row_starts, row_of_token, positions))
        media_cells = torch.from_numpy(_media_cells(rows, row_starts))
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
        rope_positions=rope_positions,
        media_cells=media_cells,
        checkpoints=tuple(
            (i, position - row.start, slot) for i, row in enumerate(rows) for position, slot in row.checkpoints
        ),
    )
    return inputs.to(device)


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


def _rope_positions(
    rows: Sequence[Row], row_starts: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """[tokens, 3] int64: where each token stands. Of padding, anything that is a position."""
    deltas = np.array([0 if row.rope is None else row.rope.delta for row in rows], dtype=np.int64)
    found = np.repeat((positions + deltas[row_of_token])[:, None], 3, axis=1)
    for row, first, end in zip(rows, row_starts[:-1], row_starts[1:], strict=True):
        if row.rope is not None and row.start < len(row.rope.prompt):
            found[first:end] = row.rope.of(row.start, row.start + end - first)
    return np.maximum(found, 0)


def _media_cells(rows: Sequence[Row], row_starts: np.ndarray) -> np.ndarray:
    """[tokens] int64: the cells that tokens of images take, and the null one for all others."""
    cells = np.zeros(row_starts[-1], dtype=np.int64)
    for row, first in zip(rows, row_starts[:-1], strict=True):
        for use in row.media:
            start, end = max(use.start, row.start), min(use.end, row.end)
            place = first + start - row.start
            cells[place : place + end - start] = use.cells[start - use.start : end - use.start]
    return cells


def _padded(slots: tuple[int, ...], width: int) -> tuple[int, ...]:
    return slots + (0,) * (width - len(slots))


def _int32(values: Sequence[object] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))


def _kv_cells(tables: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """[tokens] int64: where each token's key and value go. Rows without blocks, and drafts beyond a row's blocks (which
    are padding), go to the null block."""
    column = np.minimum(positions // block_size, tables.shape[1] - 1)
    return tables[row_of_token, column].astype(np.int64) * block_size + positions % block_size
