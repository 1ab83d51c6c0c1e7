"""embedding: the vectors of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ostinato.ops import int8
from ostinato.ops.blocks import dequantize as in_blocks
from ostinato.ops.blocks.formats import Blocks


def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    multiplier: float,
    weight_scale: torch.Tensor | None = None,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Return the rows of `weight` [vocab, hidden] for `token_ids` [tokens] int64, times `multiplier`.

    -> [tokens, hidden] in the dtype of `weight`. With `weight_scale` float32 [vocab] or [vocab, groups], `weight` is
    int8 (see `ops.int8`), and the result is in `out_dtype`. With `blocks`, `weight` is uint8 [vocab, bytes of a row] in
    one block format (see `ops.blocks`), and the result is in `out_dtype` too.
    """
    if blocks is not None:
        ((name, _),) = blocks
        vectors = in_blocks.dequantize(name, F.embedding(token_ids, weight))
        return (vectors * multiplier).to(out_dtype)
    if weight_scale is not None:
        vectors = int8.dequantize(F.embedding(token_ids, weight), weight_scale[token_ids], group_size)
        return (vectors * multiplier).to(out_dtype)
    vectors = F.embedding(token_ids, weight)
    return vectors if multiplier == 1.0 else vectors * multiplier
