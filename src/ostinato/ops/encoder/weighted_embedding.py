"""weighted_embedding: weighted sums of learned vectors, such as position embeddings between the learned ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def weighted_embedding(ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Sum weights[:, i] * table[ids[:, i]] over i, in float32.

    `ids` [tokens, count] int64, `weights` [tokens, count] float32, `table` [rows, hidden] -> [tokens, hidden] in the
    dtype of `table`.
    """
    total = torch.zeros(ids.shape[0], table.shape[1], dtype=torch.float32, device=ids.device)
    for of_ids, of_weights in zip(ids.unbind(1), weights.unsqueeze(-1).unbind(1), strict=True):
        total += F.embedding(of_ids, table) * of_weights
    return total.to(table.dtype)
