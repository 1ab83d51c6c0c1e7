"""encoder_attention on a GPU: tiles of a segment's patches against all of its keys, with running maxima and sums.

Dao et al. 2022, arXiv 2205.14135.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import attention as launches
from ostinato.ops.launches.tiles import num_tiles
from ostinato.ops.triton import launcher
from ostinato.ops.triton.attention import LOG2_E
from ostinato.ops.triton.launcher import dot_operand, to_dtype
from ostinato.ops.triton.tiles import find_tile


@triton.jit(do_not_specialize=["patches", "segments"])
def attend_in_segment(
    q,
    k,
    v,
    starts,
    out,
    scale,
    patches,
    segments,
    heads,
    q_patch,
    q_head,
    k_patch,
    k_head,
    v_patch,
    v_head,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Attend from one tile of patches, with one head. Patches after the last segment have no keys, and get zeros."""
    head = tl.program_id(1)
    segment, first, end = find_tile(starts, segments, patches, tl.program_id(0), ROWS, SPAN)
    if first < end:
        of_segment = tl.minimum(segment, segments - 1)
        begin = tl.load(starts + of_segment)
        last = tl.where(segment < segments, tl.load(starts + of_segment + 1), begin)
        patch = first + tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        in_head = column < HEAD_DIM
        is_patch = patch < last
        query = tl.load(
            q + patch.to(tl.int64)[:, None] * q_patch + head * q_head + column[None, :],
            mask=is_patch[:, None] & in_head[None, :],
            other=0.0,
        )
        query = dot_operand(query)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values_sum = tl.zeros([ROWS, WIDTH], tl.float32)
        for base in range(begin, last, KEYS):
            key = base + tl.arange(0, KEYS)
            is_key = key < last
            key = key.to(tl.int64)
            keys = tl.load(
                k + key[None, :] * k_patch + head * k_head + column[:, None],
                mask=is_key[None, :] & in_head[:, None],
                other=0.0,
            )
            values = tl.load(
                v + key[:, None] * v_patch + head * v_head + column[None, :],
                mask=is_key[:, None] & in_head[None, :],
                other=0.0,
            )
            values = dot_operand(values)
            score = tl.dot(query, dot_operand(keys), input_precision="tf32x3") * scale
            score = tl.where(is_key[None, :], score, float("-inf"))
            better = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp2(score - better[:, None])
            fade = tl.exp2(best - better)
            total = total * fade + tl.sum(weight, 1)
            values_sum = values_sum * fade[:, None]
            values_sum = tl.dot(to_dtype(weight, values.dtype), values, values_sum, input_precision="tf32x3")
            best = better
        # A segment with patches has keys; elsewhere the sums are zero.
        result = values_sum / tl.where(total == 0, 1.0, total)[:, None]
        where = out + (patch.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(where, to_dtype(result, out.dtype.element_ty), mask=(patch < end)[:, None] & in_head[None, :])


def encoder_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Compute `ops.encoder.encoder_attention`; its reference documents arguments and result."""
    patches, heads, head_dim = q.shape
    segments = starts.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not patches or not segments:
        return out.zero_()
    (launch,) = launches.encoder_attention_launches(
        head_dim=head_dim, element_bytes=q.element_size(), capability=launcher.capability(q)
    )
    launcher.run(
        attend_in_segment,
        (num_tiles(patches, segments, launch.blocks["ROWS"]), heads),
        launch,
        q=q,
        k=k,
        v=v,
        starts=starts,
        out=out,
        scale=LOG2_E / math.sqrt(head_dim),
        patches=patches,
        segments=segments,
        heads=heads,
        q_patch=q.stride(0),
        q_head=q.stride(1),
        k_patch=k.stride(0),
        k_head=k.stride(1),
        v_patch=v.stride(0),
        v_head=v.stride(1),
    )
    return out
