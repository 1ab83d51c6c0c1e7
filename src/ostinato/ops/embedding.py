"""embedding: the vectors of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops.native import DTYPES, Lowered, check_rows


def reference(token_ids: torch.Tensor, weight: torch.Tensor, multiplier: float) -> torch.Tensor:
    """`token_ids` [tokens] int64, `weight` [vocab, hidden] -> their rows times `multiplier`, [tokens, hidden] in the
    dtype of `weight`."""
    vectors = F.embedding(token_ids, weight)
    return vectors if multiplier == 1.0 else vectors * multiplier


def lower(
    token_ids: torch.Tensor, weight: torch.Tensor, multiplier: float, *, out: torch.Tensor | None = None
) -> Lowered:
    check_rows("embedding", token_ids, weight)
    tokens, hidden = token_ids.shape[0], weight.shape[1]
    out = torch.empty(tokens, hidden, dtype=weight.dtype) if out is None else out
    pointers = (token_ids.data_ptr(), weight.data_ptr(), weight.stride(0), out.data_ptr())
    return out, (tokens, *pointers, hidden, multiplier, DTYPES[weight.dtype])
