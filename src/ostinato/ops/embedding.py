"""embedding: the vectors of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(token_ids: torch.Tensor, weight: torch.Tensor, multiplier: float) -> torch.Tensor:
    """`token_ids` [tokens] int64, `weight` [vocab, hidden] -> their rows times `multiplier`, [tokens, hidden] in the
    dtype of `weight`."""
    vectors = F.embedding(token_ids, weight)
    return vectors if multiplier == 1.0 else vectors * multiplier
