"""Pooling: the hidden states of a prompt, gathered into one vector for each request that wants an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ostinato.runner.inputs import Drafts
from ostinato.scheduler.batch import Batch

if TYPE_CHECKING:
    from ostinato.sampling.pooler import HiddenStatePooler


def pool_rows(hidden: torch.Tensor, batch: Batch, drafts: Drafts = ()) -> None:
    """Add a step's hidden states to the pool of each batch row that has one.

    `hidden` is [tokens, hidden], the result of `forward`.
    """
    pools = [getattr(row.sampling_state, "pooler", None) for row in batch.rows]
    if not any(pools):  # almost every step has none
        return
    found: list[tuple[HiddenStatePooler, int, int]] = []
    vectors: list[torch.Tensor] = []
    has_drafts = any(drafts)
    begin = 0
    for i, (row, pool) in enumerate(zip(batch.rows, pools, strict=True)):
        end = begin + len(row.token_ids)
        if pool is not None and (pool.kind == "mean" or row.samples):
            found.append((pool, row.start, end - begin))
            vectors.append(
                hidden[begin:end].sum(0, dtype=torch.float32) if pool.kind == "mean" else hidden[end - 1].float()
            )
        begin = end + (batch.num_drafts if has_drafts and i < batch.num_decode_rows else 0)
    if found:
        gathered = torch.stack(vectors).cpu().numpy()
        for (pool, start, count), vector in zip(found, gathered, strict=True):
            pool.add(vector, start, count)
