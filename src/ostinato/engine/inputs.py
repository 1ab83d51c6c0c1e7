"""A batch as tensors."""

from __future__ import annotations

import itertools

import torch

from ostinato.layers.step import StepInputs
from ostinato.schedule.batch import Batch


def step_inputs(batch: Batch, block_size: int, device: torch.device) -> StepInputs:
    """The kernels' view of `batch`. Models without blocks or slots get null ids there."""
    rows = batch.rows
    lengths = [len(row.token_ids) for row in rows]
    width = max(max(len(row.block_table) for row in rows), 1)
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    for i, row in enumerate(rows):
        tables[i, : len(row.block_table)] = torch.tensor(row.block_table, dtype=torch.int32)
    starts = torch.tensor([row.start for row in rows], dtype=torch.int32)
    row_starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    row_of_token = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    offset = torch.arange(batch.num_tokens) - row_starts[:-1].long()[row_of_token]
    positions = starts.long()[row_of_token] + offset
    inputs = StepInputs(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.int64),
        positions=positions,
        row_starts=row_starts,
        start_positions=starts,
        kv_lens=torch.tensor([row.end for row in rows], dtype=torch.int32),
        block_tables=tables,
        kv_cells=_kv_cells(tables, row_of_token, positions, block_size),
        read_slots=torch.tensor([row.read_slot for row in rows], dtype=torch.int32),
        write_slots=torch.tensor([row.write_slots for row in rows], dtype=torch.int32),
        num_decode_rows=batch.num_decode_rows,
        checkpoints=tuple(
            (i, position - row.start, slot) for i, row in enumerate(rows) for position, slot in row.checkpoints
        ),
    )
    return inputs if device.type == "cpu" else inputs.to(device)


def logit_positions(batch: Batch) -> list[int]:
    """Indices of the batch's tokens whose logits are wanted: each row's `num_logits` trailing ones."""
    wanted: list[int] = []
    end = 0
    for row in batch.rows:
        end += len(row.token_ids)
        wanted.extend(range(end - row.num_logits, end))
    return wanted


def _kv_cells(
    tables: torch.Tensor, row_of_token: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """[tokens] int64: where each token's key and value go. Rows without blocks go to the null block."""
    column = (positions // block_size).clamp_(max=tables.shape[1] - 1)
    return tables[row_of_token, column].long() * block_size + positions % block_size
