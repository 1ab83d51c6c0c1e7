"""float8 weights and their scales, as numbers."""

from __future__ import annotations

import torch

from ostinato.plan.stored_weights import StoredWeights


def expanded(
    stored: StoredWeights, weight: torch.Tensor, scale: torch.Tensor, begin: int, columns: int
) -> torch.Tensor:
    """Return rows of a float8 matrix times their scales, as float32 [rows, columns].

    `weight` [rows, columns] begins at row `begin` of the matrix. `scale` is of the whole matrix: one number, one for
    each row, or one for each block.
    """
    return weight.float() * scales(stored, scale, begin, begin + len(weight), columns, 1)


def scales(
    stored: StoredWeights, scale: torch.Tensor, begin: int, end: int, columns: int, elements: int
) -> torch.Tensor:
    """Return the scales of the rows `begin` to `end` of a matrix, float32 [rows, columns / elements].

    Each `elements` of a row with `columns` elements share a scale.
    """
    scale, count = scale.float(), columns // elements
    if scale.numel() == 1:
        return scale.view(1, 1).expand(end - begin, count)
    rows = torch.arange(begin, end)
    if stored.block is None or stored.block == (0, 0):
        return scale.view(-1, 1)[rows].expand(-1, count)
    high, wide = stored.block
    return scale[(rows // high)[:, None], torch.arange(count) * elements // wide]
