"""rotary on a GPU: a program rotates some query heads of one token, or some of its key heads.

With key heads it also writes keys and values into the token's cell of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import rotary as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.integers import larger, rounded_to_integer, scale_of
from ostinato.ops.triton.rotate import rotate_heads


@triton.jit(do_not_specialize=["tokens"])
def rotate_and_store(
    q,
    k,
    v,
    angles,
    k_cache,
    v_cache,
    kv_cells,
    k_scales,
    v_scales,
    out,
    key_multiplier,
    tokens,
    heads,
    kv_heads,
    q_programs,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    key_cell,
    key_head,
    value_cell,
    value_head,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate queries in the first `q_programs` programs of a token, keys in the others, which also copy values."""
    token = tl.program_id(0)
    program = tl.program_id(1)
    if program < q_programs:
        rotate_heads(
            q,
            out,
            None,
            angles,
            token,
            tokens,
            program * HEADS,
            heads,
            q_token,
            q_head,
            token.to(tl.int64) * heads * HEAD_DIM,
            HEAD_DIM,
            0,
            1.0,
            HEAD_DIM,
            HALF,
            HALF_WIDTH,
            REST_WIDTH,
            HEADS,
        )
    else:
        first = (program - q_programs) * HEADS
        cell = tl.load(kv_cells + token)
        rotate_heads(
            k,
            k_cache,
            k_scales,
            angles,
            token,
            tokens,
            first,
            kv_heads,
            k_token,
            k_head,
            cell * key_cell,
            key_head,
            cell * kv_heads,
            key_multiplier,
            HEAD_DIM,
            HALF,
            HALF_WIDTH,
            REST_WIDTH,
            HEADS,
        )
        if v is not None:
            head = (first + tl.arange(0, HEADS))[:, None]
            element = tl.arange(0, WIDTH)[None, :]
            is_own = (head < kv_heads) & (element < HEAD_DIM)
            value = tl.load(v + token.to(tl.int64) * v_token + head * v_head + element, mask=is_own, other=0.0)
            if v_scales is not None:
                scale = scale_of(larger(tl.zeros([HEADS], tl.float32), value))
                of_head = first + tl.arange(0, HEADS)
                tl.store(v_scales + cell * kv_heads + of_head, scale, mask=of_head < kv_heads)
                value = rounded_to_integer(value, scale)
            tl.store(v_cache + cell * value_cell + head * value_head + element, value, mask=is_own)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    angles: torch.Tensor | None,
    key_multiplier: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    kv_cells: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.rotary`; its reference documents arguments and result."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Without angles the result is the queries, unchanged.
    out = q if angles is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (launch,) = launches.rotary_launches(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotated=0 if angles is None else 2 * angles.shape[-1],
        capability=launcher.capability(q),
    )
    at_once = launch.blocks["HEADS"]
    q_programs = 0 if angles is None else cdiv(heads, at_once)
    launcher.run(
        rotate_and_store,
        (tokens, q_programs + cdiv(kv_heads, at_once)),
        launch,
        q=q,
        k=k,
        v=v,
        angles=angles,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_cells=kv_cells,
        k_scales=k_scales,
        v_scales=v_scales,
        out=out,
        key_multiplier=key_multiplier,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        q_programs=q_programs,
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=0 if v is None else v.stride(0),
        v_head=0 if v is None else v.stride(1),
        key_cell=k_cache.stride(1),
        key_head=k_cache.stride(2),
        value_cell=0 if v_cache is None else v_cache.stride(1),
        value_head=0 if v_cache is None else v_cache.stride(2),
    )
    return out
