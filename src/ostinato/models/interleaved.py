"""Rows of a weight that take turns in the checkpoint, brought together once they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.layers import pages
from ostinato.layers.module import Module


def bring_together(model: Module) -> None:
    """Orders the rows of each weight that is `interleaved` as its row of the weight table says. A row's scales, or its
    blocks, go with it. One weight at a time takes its memory twice."""
    for module, attribute, row in model.weights():
        if not row.interleaved:
            continue
        order = together(row.shape[0], row.interleaved)
        for each in (attribute, "weight_scale"):
            tensor = getattr(module, each, None)
            if tensor is None:
                continue
            assert tensor.shape[0] == row.shape[0], "the rows of one tensor of a checkpoint have one format"
            ordered = pages.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
            torch.index_select(tensor, 0, order.to(tensor.device), out=ordered)
            if row.turns_first:
                transpose_first(ordered, row.interleaved)
            setattr(module, each, ordered)


def transpose_first(ordered: torch.Tensor, sizes: Sequence[int]) -> None:
    """Transposes each matrix [sizes[0], columns] of the first part, in place; a matrix takes the memory that it had."""
    turns = ordered.shape[0] // sum(sizes)
    for matrix in ordered[: turns * sizes[0]].split(sizes[0]):
        matrix.view(-1).copy_(matrix.t().flatten())


def together(rows: int, sizes: Sequence[int]) -> torch.Tensor:
    """Where each of `rows` rows stood, of which parts of these `sizes` take turns: those of the first part first.
    [rows] int64"""
    turns = torch.arange(rows).view(-1, sum(sizes))
    return torch.cat([part.flatten() for part in turns.split(list(sizes), dim=1)])
