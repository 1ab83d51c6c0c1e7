"""Shared parts of kernels over prompts of unequal lengths: a program's tokens, and the checkpoints of each row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ostinato.ops.triton.launcher import sent
from ostinato.ops.triton.tiles import owner_of

ROW_INPUTS = ("row_starts", "start_positions", "read_slots", "write_slots")
"""Inputs with an entry per row.

Entries of prompts follow those of decode rows, at another address in each step: a kernel must not be specialised on it.
"""


@triton.jit
def segment_of(index, row_starts, rows, TOKENS: tl.constexpr, SPAN: tl.constexpr):
    """Return (row, first token) of a segment; each row is split into segments of `TOKENS` tokens from its begin.

    The token is at or after the row's end if `index` is one too many. Row r's segments begin with number `start //
    TOKENS + r`. So `tokens // TOKENS + rows` programs are enough, whatever the lengths, and the host need not know
    them.
    """
    base = tl.load(row_starts)  # Other rows may come first.
    own = owner_of(index, row_starts, rows, base, TOKENS, 1, SPAN)
    start = tl.load(row_starts + own)
    return own, start + (index - (start - base) // TOKENS - own) * TOKENS


@triton.jit
def first_chunk(row, start, base, TOKENS: tl.constexpr):
    """Return the number of a row's first chunk, if rows are split at absolute multiples of `TOKENS`.

    A row of n tokens has at most n // TOKENS + 2 chunks, so `tokens // TOKENS + 2 * rows` are enough.
    """
    return (start - base) // TOKENS + 2 * row


@triton.jit
def chunk_of(index, row_starts, start_positions, rows, TOKENS: tl.constexpr, SPAN: tl.constexpr):
    """Return (row, first token, end) of a chunk, which may have no tokens."""
    base = tl.load(row_starts)  # Other rows may come first.
    own = owner_of(index, row_starts, rows, base, TOKENS, 2, SPAN)
    start, end = tl.load(row_starts + own), tl.load(row_starts + own + 1)
    before = tl.load(start_positions + own) % TOKENS  # Tokens of the first chunk in earlier steps.
    first = start - before + (index - first_chunk(own, start, base, TOKENS)) * TOKENS
    return own, tl.maximum(first, start), tl.minimum(first + TOKENS, end)


def checkpoint_table(
    checkpoints: Sequence[tuple[int, int, int]], first_row: int, rows: int, device: torch.device
) -> tuple[torch.Tensor | None, int]:
    """Return the checkpoints of `rows` rows from `first_row` on, as int32, and their number.

    The table has `rows + 1` begins of the rows' entries, then (offset, slot) of each, by row. None and 0 if there are
    no checkpoints.
    """
    if not checkpoints:
        return None, 0
    return _table(tuple(map(tuple, checkpoints)), first_row, rows, device), len(checkpoints)


@lru_cache(64)
def _table(
    checkpoints: tuple[tuple[int, int, int], ...], first_row: int, rows: int, device: torch.device
) -> torch.Tensor:
    """Make the table once for all layers of a step."""
    ordered = sorted(checkpoints)
    begins = [sum(row - first_row < r for row, _, _ in ordered) for r in range(rows + 1)]
    places = [place for _, offset, slot in ordered for place in (offset, slot)]
    return sent(torch.tensor(begins + places, dtype=torch.int32), device)
