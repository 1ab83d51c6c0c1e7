"""Inputs of a step from a batch, written straight into the buffers that models and graphs read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ostinato.graphs.buffers import StepBuffers
from ostinato.ops.arrays import Arrays
from ostinato.ops.step_inputs import StepInputs
from ostinato.plan.layer_specs import VisionSpec
from ostinato.scheduler.batch import Batch, BatchRow

Drafts = Sequence[tuple[int, ...]]
"""Drafts of each batch row, or nothing.

If there are any, each decode row has `num_drafts` tokens of the batch after its own token, the last of them possibly
padding.
"""


def write_step_inputs(buffers: StepBuffers, batch: Batch, block_size: int, drafts: Drafts = ()) -> StepInputs:
    """Write `batch` into `buffers`, and return views of it, valid until the next step.

    The step is ready when `buffers.pad` has padded it. Models without blocks or slots get null ids there.
    """
    rows, arrays = batch.rows, buffers.arrays
    count = len(rows)
    starts = [row.start for row in rows]
    buffers.write_tables([row.block_table for row in rows])
    if buffers.has_window_blocks:
        buffers.write_window_tables([row.window_block_table for row in rows])
    arrays["start_positions"][:count] = starts
    arrays["read_slots"][:count] = [row.read_slot for row in rows]
    if batch.num_decode_rows == count and not any(drafts):
        # Most steps have one token per row, so they are written without a look at each token.
        arrays["token_ids"][:count] = [row.token_ids[0] for row in rows]
        arrays["positions"][:count] = starts
        arrays["kv_cells"][:count] = [_kv_cell(row.block_table, row.start, block_size) for row in rows]
        if buffers.has_window_blocks:
            arrays["window_kv_cells"][:count] = [
                _kv_cell(row.window_block_table, row.start, block_size) for row in rows
            ]
        arrays["row_starts"][: count + 1] = np.arange(count + 1)
        arrays["kv_lens"][:count] = [start + 1 for start in starts]
        arrays["write_slots"][:count, 0] = [row.write_slots[0] for row in rows]
        if buffers.takes_images:
            # A decoding request is past all its image tokens.
            deltas = [0 if row.rope is None else row.rope.delta for row in rows]
            arrays["rope_positions"][:count] = np.add(starts, deltas)[:, None]
            arrays["media_cells"][:count] = 0
        if buffers.sees_ahead:
            arrays["last_seen"][:count] = starts
        return buffers.view(count, count, 1, count)
    if batch.num_decode_rows == count and not buffers.sees_ahead and all(len(e) == batch.num_drafts for e in drafts):
        return _write_drafts(buffers, batch, starts, block_size, drafts)
    counts = [len(row_drafts) for row_drafts in drafts] if any(drafts) else [0] * count
    width = 1 + batch.num_drafts if any(counts) else 1
    arrays["kv_lens"][:count] = [row.end + drafted for row, drafted in zip(rows, counts, strict=True)]
    arrays["write_slots"][:count, :width] = [
        _padded(row.write_slots[: 1 + drafted], width) for row, drafted in zip(rows, counts, strict=True)
    ]
    real = [len(row.token_ids) + drafted for row, drafted in zip(rows, counts, strict=True)]
    lengths = [width] * batch.num_decode_rows + real[batch.num_decode_rows :]
    row_starts = np.array([0, *itertools.accumulate(lengths)])
    tokens = int(row_starts[-1])
    arrays["row_starts"][: count + 1] = row_starts
    token_ids: list[int] = []
    for i, row in enumerate(rows):
        token_ids += row.token_ids
        if counts[i]:
            token_ids += drafts[i]
        token_ids += [0] * (lengths[i] - real[i])
    arrays["token_ids"][:tokens] = token_ids
    row_of_token = np.repeat(np.arange(count), lengths)
    offset = np.arange(tokens) - row_starts[row_of_token]
    positions = arrays["positions"][:tokens]
    positions[:] = np.array(starts)[row_of_token] + offset
    is_padding = offset >= np.array(real)[row_of_token] if lengths != real else None
    for cells, tables in _tables(buffers):
        cells[:tokens] = _kv_cells(tables, row_of_token, positions, block_size)
        if is_padding is not None:
            cells[:tokens][is_padding] = 0
    if is_padding is not None:
        positions[is_padding] = 0
    if buffers.sees_ahead:
        ends = np.array([row.prompt_end if row.start < row.prompt_end else 0 for row in rows])
        arrays["last_seen"][:tokens] = np.maximum(positions, ends[row_of_token] - 1)
    if buffers.takes_images:
        _write_rope_positions(arrays["rope_positions"][:tokens], rows, row_starts, row_of_token, positions)
        _write_media_cells(arrays["media_cells"][:tokens], arrays["last_seen"], rows, row_starts)
        if buffers.media_token_id is not None:
            arrays["token_ids"][:tokens][arrays["media_cells"][:tokens] > 0] = buffers.media_token_id
    checkpoints = tuple(
        (i, position - row.start, slot) for i, row in enumerate(rows) for position, slot in row.checkpoints
    )
    return buffers.view(count, tokens, width, batch.num_decode_rows, checkpoints)


def write_next_tokens(buffers: StepBuffers, rows: Sequence[BatchRow], tokens: Sequence[int], block_size: int) -> None:
    """Advance a step of one token per batch row, present in `buffers`, by one position, to `tokens`, one per row.

    Slots stay the same: this is for layers without any. A token beyond a row's blocks goes to the null block.
    """
    count, arrays = len(rows), buffers.arrays
    positions = arrays["positions"][:count]
    positions += 1
    arrays["token_ids"][:count] = tokens
    arrays["start_positions"][:count] += 1
    arrays["kv_lens"][:count] += 1
    at = list(zip(rows, positions.tolist(), strict=True))
    arrays["kv_cells"][:count] = [_kv_cell(row.block_table, position, block_size) for row, position in at]
    if buffers.has_window_blocks:
        arrays["window_kv_cells"][:count] = [
            _kv_cell(row.window_block_table, position, block_size) for row, position in at
        ]
    if buffers.takes_images:
        arrays["rope_positions"][:count] += 1
    if buffers.sees_ahead:
        arrays["last_seen"][:count] += 1


def make_step_inputs(
    batch: Batch, block_size: int, arrays: Arrays, drafts: Drafts = (), *, vision: VisionSpec | None = None
) -> StepInputs:
    """Return `batch` in new buffers of its exact size, for one step; `vision` if the model takes images."""
    rows = batch.rows
    tokens = sum(len(row.token_ids) for row in rows) + batch.num_decode_rows * batch.num_drafts
    blocks = max((len(row.block_table) for row in rows), default=0)
    window_blocks = max((len(row.window_block_table) for row in rows), default=0)
    token_id, slots = None if vision is None else vision.text_token_id, 1 + batch.num_drafts
    buffers = StepBuffers(
        len(rows),
        tokens,
        blocks,
        slots,
        arrays,
        vision is not None,
        window_blocks,
        token_id,
        any(row.prompt_end for row in rows),
    )
    inputs = write_step_inputs(buffers, batch, block_size, drafts)
    buffers.pad(len(rows), inputs.num_tokens, len(rows), inputs.num_tokens)
    return inputs


def _write_drafts(
    buffers: StepBuffers, batch: Batch, starts: Sequence[int], block_size: int, drafts: Drafts
) -> StepInputs:
    """Write the rest of a step whose rows all decode with the same number of drafts, as most steps with drafts do."""
    rows, arrays = batch.rows, buffers.arrays
    count, width = len(rows), 1 + batch.num_drafts
    tokens = count * width
    ahead = np.arange(width)
    positions = np.add.outer(starts, ahead)
    arrays["token_ids"][:tokens].reshape(count, width)[:, 0] = [row.token_ids[0] for row in rows]
    arrays["token_ids"][:tokens].reshape(count, width)[:, 1:] = drafts
    arrays["positions"][:tokens] = positions.ravel()
    arrays["row_starts"][: count + 1] = np.arange(0, tokens + 1, width)
    arrays["kv_lens"][:count] = positions[:, -1] + 1
    arrays["write_slots"][:count, :width] = [_padded(row.write_slots[:width], width) for row in rows]
    for cells, tables in _tables(buffers):
        cells[:tokens] = _kv_cells(tables, np.arange(count)[:, None], positions, block_size).ravel()
    return buffers.view(count, tokens, width, count)


def _write_rope_positions(
    out: np.ndarray, rows: Sequence[BatchRow], row_starts: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray
) -> None:
    """Write the RoPE position of each token, [tokens, 3]; for padding, any valid position."""
    deltas = np.array([0 if row.rope is None else row.rope.delta for row in rows], dtype=np.int64)
    out[:] = (positions + deltas[row_of_token])[:, None]
    for row, first, end in zip(rows, row_starts[:-1], row_starts[1:], strict=True):
        if row.rope is not None and row.start < len(row.rope.prompt):
            out[first:end] = row.rope.of(row.start, row.start + end - first)
    np.maximum(out, 0, out=out)


def _write_media_cells(
    out: np.ndarray, last_seen: np.ndarray, rows: Sequence[BatchRow], row_starts: np.ndarray
) -> None:
    """Write the encoder cache cell of each token of an image, [tokens], and the null cell for all others.

    `last_seen` [tokens] gets the last position of each token's image.
    """
    out[:] = 0
    for row, first in zip(rows, row_starts[:-1], strict=True):
        for use in row.media:
            start, end = max(use.start, row.start), min(use.end, row.end)
            place = first + start - row.start
            out[place : place + end - start] = use.cells[start - use.start : end - use.start]
            last_seen[place : place + end - start] = use.end - 1


def _padded(slots: tuple[int, ...], width: int) -> tuple[int, ...]:
    return slots + (0,) * (width - len(slots))


def _tables(buffers: StepBuffers) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (cells, tables) of blocks and, in a model with window blocks, of those."""
    names = [("kv_cells", "block_tables"), ("window_kv_cells", "window_block_tables")]
    return [(buffers.arrays[cells], buffers.arrays[tables]) for cells, tables in names[: 1 + buffers.has_window_blocks]]


def _kv_cells(tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Return the cells for the keys and values of `positions` of `rows`.

    Rows without blocks, and drafts beyond a row's blocks, which are padding, go to the null block.
    """
    column = np.minimum(positions // block_size, tables.shape[1] - 1)
    cells: np.ndarray = tables[rows, column].astype(np.int64) * block_size + positions % block_size
    return cells


def _kv_cell(table: Sequence[int], position: int, block_size: int) -> int:
    """Return the cell for the key and value of `position`; in the null block for rows without blocks."""
    column, offset = divmod(position, block_size)
    return (table[column] if column < len(table) else 0) * block_size + offset
