"""float8 weights and their scales, as numbers."""

from __future__ import annotations

import torch

from ostinato.plan.stored_weights import StoredWeights


def expanded(
    stored: StoredWeights, weight: torch.Tensor, scale: torch.Tensor, begin: int, columns: int
) -> torch.Tensor:
    """Rows of a float8 matrix, of which `weight` [rows, columns] begins at row `begin`, times the scales of the whole
    matrix: one number, one for each row, or one for each block. -> float32 [rows, columns]"""
    values, scale = weight.float(), scale.float()
    rows = torch.arange(begin, begin + len(weight))
    if scale.numel() == 1:
        return values * scale.view(())
    if stored.block is None or stored.block == (0, 0):
        return values * scale.view(-1, 1)[rows]
    high, wide = stored.block
    return values * scale[rows // high].repeat_interleave(wide, dim=1)[:, :columns]
