"""`attention` and `encoder_attention` on a GPU: tiles of queries against keys, with running maxima and sums.

Dao et al. 2022, arXiv 2205.14135. In `attention`, rows of few tokens split their keys into segments, which a second
kernel combines (Flash-Decoding). In `encoder_attention`, a tile is a segment's patches against all of its keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import attention as launches
from ostinato.ops.launch_tables.launch import cdiv, num_tiles
from ostinato.ops.triton import common
from ostinato.ops.triton.common import dot_operand, find_tile, to_dtype

NO_WINDOW = 2**30
"""Window larger than any position."""

LOG2_E = 1.4426950408889634
"""Factor from exponents of e to exponents of 2, whose powers the hardware computes."""

IN_KERNEL_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def columns(start, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the indices of `WIDTH` elements of a head from `start` on, and a mask of those that exist."""
    column = start + tl.arange(0, WIDTH)
    return column, column < HEAD_DIM


@triton.jit
def kept_operand(kept, dtype: tl.constexpr):
    """Return cached values as an operand of `tl.dot` with one of `dtype`.

    Integers are exact in all float types. The interpreter converts only float32 to bfloat16.
    """
    if kept.dtype == tl.int8:
        kept = to_dtype(kept.to(tl.float32), dtype)
    return dot_operand(kept)


@triton.jit
def tanh(y):
    """Return 1 - 2 / (1 + e^(2 y)), or the series of tanh near 0, where that loses digits."""
    square = y * y
    series = -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))
    large = 1.0 - 2.0 / (1.0 + tl.exp2(y * 2.0 * IN_KERNEL_LOG2_E))
    return tl.where(square < 0.0625, y + y * square * series, large)


@triton.jit(do_not_specialize=["window", "tokens", "rows"])
def attend(
    q,
    k_cache,
    v_cache,
    row_starts,
    start_positions,
    kv_lens,
    block_tables,
    k_scales,
    v_scales,
    sinks,
    last_seen,
    out,
    maxima,
    sums,
    scale,
    softcap,
    first_key,
    window,
    tokens,
    rows,
    q_token,
    q_head,
    key_block,
    key_cell,
    key_head,
    value_block,
    value_cell,
    value_head,
    table_row,
    heads,
    kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Attend from a tile of `ROWS // GROUP` tokens, with the query heads of one key head, to one segment of the keys.

    `out` [tokens, heads, head_dim], or with segments [tokens, heads, SEGMENTS, head_dim] float32, not yet divided by
    `sums` and scaled as if 2 to the power of `maxima` were 1; both [tokens, heads, SEGMENTS]. Integer keys and values
    are multiplied as integers: a key's scale multiplies its score, a value's scale its weight. Scores are exponents of
    2. With a `softcap`, scores times `scale` are the argument of tanh.

    A head's first `WIDTH` elements, a power of two, are one operand; the elements after them, if any, are another of
    `REST` elements. With `PART`, keys are multiplied `PART` elements at a time, by queries that are read again, in
    cases in which whole keys need more registers than there are.
    """
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    TILE: tl.constexpr = ROWS // GROUP
    DTYPE: tl.constexpr = q.dtype.element_ty
    row, first_token, end = find_tile(row_starts, rows, tokens, tl.program_id(0), TILE, SPAN)
    if first_token < end:
        is_row = row < rows
        of_row = tl.minimum(row, rows - 1)
        kv_len = tl.where(is_row, tl.load(kv_lens + of_row), 0)
        start = tl.load(row_starts + row)
        position = tl.load(start_positions + of_row)
        place = tl.arange(0, ROWS)
        token = first_token + place // GROUP
        head = kv_head * GROUP + place % GROUP
        is_token = (place < TILE * GROUP) & (token < end)
        at = position + token - start
        attends = is_token & (at < kv_len)
        column, in_head = columns(0, WIDTH, HEAD_DIM)
        from_q = q + (token.to(tl.int64) * q_token + head * q_head)[:, None]
        if PART == 0:
            query = tl.load(from_q + column[None, :], mask=attends[:, None] & in_head[None, :], other=0.0)
            query = dot_operand(query)
        if REST > 0:
            further, in_rest = columns(WIDTH, REST, HEAD_DIM)
        if REST > 0 and PART == 0:
            query_rest = tl.load(from_q + further[None, :], mask=attends[:, None] & in_rest[None, :], other=0.0)
            query_rest = dot_operand(query_rest)
        # The row's keys are split into equal segments of whole tiles. No token of the tile sees keys after its last
        # token, nor keys before its first token's window.
        earliest = tl.maximum(first_key, position + first_token - start - window + 1)
        begin = earliest // KEYS * KEYS
        length = tl.cdiv(tl.cdiv(tl.maximum(kv_len - begin, 0), KEYS), SEGMENTS) * KEYS
        last = tl.minimum(kv_len, position + end - start)
        until = at
        if last_seen is not None:
            until = tl.maximum(at, tl.load(last_seen + token, mask=attends, other=0))
            last = tl.minimum(kv_len, tl.maximum(last, tl.max(tl.where(attends, until, 0), 0) + 1))
        begin += segment * length
        last = tl.minimum(last, begin + length)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if sinks is not None:
            # A sink is a score without a value; the first segment has it.
            has_sink = attends & (segment == 0)
            best = tl.load(sinks + head, mask=has_sink, other=float("-inf")) * IN_KERNEL_LOG2_E
            total = tl.where(has_sink, 1.0, 0.0)
        values_sum = tl.zeros([ROWS, WIDTH], tl.float32)
        rest_sum = tl.zeros([ROWS, REST if REST > 0 else 1], tl.float32)
        table = block_tables + of_row * table_row
        for base in range(begin, last, KEYS):
            key = base + tl.arange(0, KEYS)
            is_key = (key >= earliest) & (key < last)
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            cell = key % BLOCK_SIZE
            from_keys = k_cache + (block * key_block + cell * key_cell + kv_head * key_head)[None, :]
            from_values = v_cache + (block * value_block + cell * value_cell + kv_head * value_head)[:, None]
            if PART == 0:
                keys = tl.load(from_keys + column[:, None], mask=is_key[None, :] & in_head[:, None], other=0.0)
                score = tl.dot(query, kept_operand(keys, DTYPE), input_precision="tf32x3")
            else:
                score = tl.zeros([ROWS, KEYS], tl.float32)
                for piece in range(0, HEAD_DIM, PART):
                    part, in_part = columns(piece, PART, HEAD_DIM)
                    query = tl.load(from_q + part[None, :], mask=attends[:, None] & in_part[None, :], other=0.0)
                    keys = tl.load(from_keys + part[:, None], mask=is_key[None, :] & in_part[:, None], other=0.0)
                    score = tl.dot(dot_operand(query), kept_operand(keys, DTYPE), score, input_precision="tf32x3")
            values = tl.load(from_values + column[None, :], mask=is_key[:, None] & in_head[None, :], other=0.0)
            values = kept_operand(values, DTYPE)
            if REST > 0 and PART == 0:
                keys_rest = tl.load(from_keys + further[:, None], mask=is_key[None, :] & in_rest[:, None], other=0.0)
                score = tl.dot(query_rest, kept_operand(keys_rest, DTYPE), score, input_precision="tf32x3")
            score = score * scale
            if k_scales is not None:
                of_head = (block * BLOCK_SIZE + cell) * kv_heads + kv_head
                score *= tl.load(k_scales + of_head, mask=is_key, other=0.0)[None, :]
            if softcap is not None:
                score = softcap * tanh(score)
            seen = attends[:, None] & is_key[None, :] & (key[None, :] <= until[:, None])
            seen = seen & (key[None, :] > at[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            better = tl.maximum(best, tl.max(score, 1))
            # For a token that has seen no key yet, the shift must still be a number.
            shift = tl.where(better == float("-inf"), 0.0, better)
            weight = tl.exp2(score - shift[:, None])
            fade = tl.exp2(best - shift)
            total = total * fade + tl.sum(weight, 1)
            if v_scales is not None:
                weight *= tl.load(v_scales + of_head, mask=is_key, other=0.0)[None, :]
            weight = to_dtype(weight, values.dtype)
            values_sum = tl.dot(weight, values, values_sum * fade[:, None], input_precision="tf32x3")
            if REST > 0:
                rest = tl.load(from_values + further[None, :], mask=is_key[:, None] & in_rest[None, :], other=0.0)
                rest_sum = tl.dot(weight, kept_operand(rest, DTYPE), rest_sum * fade[:, None], input_precision="tf32x3")
            best = better
        # Results are contiguous, so only the tile's offset needs 64 bits.
        first = (first_token.to(tl.int64) * heads + kv_head * GROUP) * SEGMENTS + segment
        behind = (place // GROUP * heads + place % GROUP) * SEGMENTS
        to = out + first * HEAD_DIM + behind[:, None] * HEAD_DIM
        if SEGMENTS == 1:
            result = to_dtype(divided(values_sum, total), out.dtype.element_ty)
            tl.store(to + column[None, :], result, mask=is_token[:, None] & in_head[None, :])
            if REST > 0:
                result_rest = to_dtype(divided(rest_sum, total), out.dtype.element_ty)
                tl.store(to + further[None, :], result_rest, mask=is_token[:, None] & in_rest[None, :])
        else:
            tl.store(maxima + first + behind, best, mask=is_token)
            tl.store(sums + first + behind, total, mask=is_token)
            has_keys = (is_token & (best > float("-inf")))[:, None]
            tl.store(to + column[None, :], values_sum, mask=has_keys & in_head[None, :])
            if REST > 0:
                tl.store(to + further[None, :], rest_sum, mask=has_keys & in_rest[None, :])


@triton.jit
def divided(sums, total):
    """Divide `sums` by each row's `total`, with zeros for rows without keys.

    NaN among a token's keys must not look like a row without keys.
    """
    found = tl.where((total > 0)[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    return tl.where((total != total)[:, None], float("nan"), found)


@triton.jit
def combine(parts, maxima, sums, out, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Combine the segments of a part of one token's head.

    A segment without a key that the token sees has a maximum of -inf and is not read.
    """
    flat = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    best = tl.load(maxima + flat * SEGMENTS + segment)
    total = tl.load(sums + flat * SEGMENTS + segment)
    seen = (best > float("-inf")) | (total != total)
    of_all = tl.max(best, 0)
    weight = tl.where(seen, tl.exp2(best - tl.where(of_all == float("-inf"), 0.0, of_all)), 0.0)
    value = tl.load(
        parts + (flat * SEGMENTS + segment)[:, None] * HEAD_DIM + column[None, :],
        mask=seen[:, None] & (column < HEAD_DIM)[None, :],
        other=0.0,
    )
    divisor = tl.sum(tl.where(seen, total * weight, 0.0), 0)
    result = tl.sum(value * weight[:, None], 0) / tl.where(divisor == 0, 1.0, divisor)
    tl.store(out + flat * HEAD_DIM + column, to_dtype(result, out.dtype.element_ty), mask=column < HEAD_DIM)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    first_key: int = 0,
    window: int | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    last_seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `ops.attention`; its reference documents arguments and result."""
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    rows, table = block_tables.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    found = launches.attention_launches(
        tokens=tokens,
        rows=rows,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=table * block_size,
        window=window,
        block_size=block_size,
        element_bytes=q.element_size(),
        capability=common.capability(q),
    )
    segments = launches.segments_of(found)
    parts = maxima = sums = out
    if segments > 1:
        parts = torch.empty((tokens, heads, segments, head_dim), dtype=torch.float32, device=q.device)
        maxima, sums = torch.empty((2, tokens, heads, segments), dtype=torch.float32, device=q.device)
    tile = found[0].blocks["ROWS"] // (heads // kv_heads)
    common.run(
        attend,
        (num_tiles(tokens, rows, tile), kv_heads, segments),
        found[0],
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        row_starts=row_starts,
        start_positions=start_positions,
        kv_lens=kv_lens,
        block_tables=block_tables,
        k_scales=k_scales,
        v_scales=v_scales,
        sinks=sinks,
        last_seen=last_seen,
        out=parts,
        maxima=maxima,
        sums=sums,
        scale=scale * LOG2_E if softcap is None else scale / softcap,
        softcap=None if softcap is None else softcap * LOG2_E,
        first_key=first_key,
        window=NO_WINDOW if window is None else window,
        tokens=tokens,
        rows=rows,
        q_token=q.stride(0),
        q_head=q.stride(1),
        key_block=k_cache.stride(0),
        key_cell=k_cache.stride(1),
        key_head=k_cache.stride(2),
        value_block=v_cache.stride(0),
        value_cell=v_cache.stride(1),
        value_head=v_cache.stride(2),
        table_row=block_tables.stride(0),
        heads=heads,
        kv_heads=kv_heads,
    )
    if segments > 1:
        grid = (tokens * heads, cdiv(head_dim, found[1].blocks["WIDTH"]))
        common.run(combine, grid, found[1], parts=parts, maxima=maxima, sums=sums, out=out)
    return out


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
        head_dim=head_dim, element_bytes=q.element_size(), capability=common.capability(q)
    )
    common.run(
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
