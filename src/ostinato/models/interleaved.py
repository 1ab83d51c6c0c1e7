"""De-interleaving of a weight's rows, which the checkpoint stores in alternation, after loading."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.layers import pages
from ostinato.layers.module import Module


def deinterleave(model: Module) -> None:
    """Reorder the rows of each `row_interleave` weight as its row of the weight table says.

    A row's scales, or its blocks, move with it. One weight at a time takes its memory twice.
    """
    for module, attribute, row in model.weights():
        if not row.row_interleave:
            continue
        order = deinterleaved_index(row.shape[0], row.row_interleave)
        for each in (attribute, "weight_scale"):
            tensor = getattr(module, each, None)
            if tensor is None:
                continue
            assert tensor.shape[0] == row.shape[0], "the rows of one tensor of a checkpoint have one format"
            ordered = pages.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
            torch.index_select(tensor, 0, order.to(tensor.device), out=ordered)
            if row.first_part_transposed:
                transpose_first(ordered, row.row_interleave)
            setattr(module, each, ordered)


def transpose_first(ordered: torch.Tensor, sizes: Sequence[int]) -> None:
    """Transpose each matrix [sizes[0], columns] of the first part, in place; a matrix stays in its memory."""
    turns = ordered.shape[0] // sum(sizes)
    for matrix in ordered[: turns * sizes[0]].split(sizes[0]):
        matrix.view(-1).copy_(matrix.t().flatten())


def deinterleaved_index(rows: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the old index of each of `rows` rows when interleaved parts of these `sizes` are grouped, [rows] int64.

    The rows of the first part come first.
    """
    turns = torch.arange(rows).view(-1, sum(sizes))
    return torch.cat([part.flatten() for part in turns.split(list(sizes), dim=1)])
