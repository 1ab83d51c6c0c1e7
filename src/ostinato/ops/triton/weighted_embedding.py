"""weighted_embedding on a GPU: a program adds up a part of one token's vectors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import rotary as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import to_dtype


@triton.jit
def add_vectors(ids, weights, table, out, hidden, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        vector = tl.load(ids + token * COUNT + i)
        weight = tl.load(weights + token * COUNT + i)
        total += tl.load(table + vector * hidden + element, mask=element < hidden, other=0.0).to(tl.float32) * weight
    tl.store(out + token * hidden + element, to_dtype(total, out.dtype.element_ty), mask=element < hidden)


def weighted_embedding(ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Compute `ops.encoder.weighted_embedding`; its reference documents arguments and result."""
    tokens, count = ids.shape
    hidden = table.shape[1]
    out = torch.empty((tokens, hidden), dtype=table.dtype, device=table.device)
    (launch,) = launches.weighted_embedding_launches(count=count, capability=launcher.capability(table))
    launcher.run(
        add_vectors,
        (tokens, cdiv(hidden, launch.blocks["BLOCK"])),
        launch,
        ids=ids,
        weights=weights,
        table=table,
        out=out,
        hidden=hidden,
    )
    return out
