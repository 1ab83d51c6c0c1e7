"""float8 weights and their scales, as numbers."""

from __future__ import annotations

import torch

from ostinato.plan.stored_weights import StoredWeights


def expanded(
    stored: StoredWeights, weight: torch.Tensor, scale: torch.Tensor, begin: int, columns: int
) -> torch.Tensor:
    """Rows of a float8 matrix, of which `weight` [rows, columns] begins at row `begin`, times the scales of the whole
    matrix: one number, one for each row, or one for each block. -> float32 [rows, columns]"""
    return weight.float() * scales(stored, scale, begin, begin + len(weight), columns, 1)


def scales(
    stored: StoredWeights, scale: torch.Tensor, begin: int, end: int, columns: int, elements: int
) -> torch.Tensor:
    """Those of the rows `begin` to `end` of a matrix with `columns` per row, for each `elements` of a row, which share
    one: float32 [rows, columns / elements]"""
    scale, count = scale.float(), columns // elements
    if scale.numel() == 1:
        return scale.view(1, 1).expand(end - begin, count)
    rows = torch.arange(begin, end)
    if stored.block is None or stored.block == (0, 0):
        return scale.view(-1, 1)[rows].expand(-1, count)
    high, wide = stored.block
    return scale[(rows // high)[:, None], torch.arange(count) * elements // wide]
