"""attention on a GPU: tiles of queries against paged keys and values, with running maxima and sums (Dao et al. 2022,
arXiv 2205.14135). Rows of few tokens cut their keys into segments, which a second kernel combines (Flash-Decoding)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import attention as launches
from ostinato.ops.launches.tiles import num_tiles
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import dot_operand, to_dtype
from ostinato.ops.triton.tiles import find_tile

NO_WINDOW = 2**30
"""More positions than there are."""

LOG2_E = 1.4426950408889634
"""Powers of 2 are what the hardware has."""


@triton.jit
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
    out,
    maxima,
    sums,
    scale,
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
    BLOCK_SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """One tile of `ROWS // GROUP` tokens, the query heads of one key head, one segment of the keys.

    `out` [tokens, heads, head_dim], or with segments [tokens, heads, SEGMENTS, head_dim] float32, not yet divided by
    `sums` and as if 2 to the power of `maxima` were 1; both [tokens, heads, SEGMENTS]. Keys and values that are
    integers are multiplied as such: a key's scale multiplies its score, a value's its weight.
    """
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    TILE: tl.constexpr = ROWS // GROUP
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
        column = tl.arange(0, WIDTH)
        in_head = column < HEAD_DIM
        query = tl.load(
            q + token[:, None] * q_token + head[:, None] * q_head + column[None, :],
            mask=attends[:, None] & in_head[None, :],
            other=0.0,
        )
        query = dot_operand(query)
        # The row's keys, in whole tiles, cut into equal segments; no token of the tile sees those behind its last one,
        # nor those before its first one's window.
        earliest = tl.maximum(first_key, position + first_token - start - window + 1)
        begin = earliest // KEYS * KEYS
        length = tl.cdiv(tl.cdiv(tl.maximum(kv_len - begin, 0), KEYS), SEGMENTS) * KEYS
        last = tl.minimum(kv_len, position + end - start)
        begin += segment * length
        last = tl.minimum(last, begin + length)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values_sum = tl.zeros([ROWS, WIDTH], tl.float32)
        table = block_tables + of_row * table_row
        for base in range(begin, last, KEYS):
            key = base + tl.arange(0, KEYS)
            is_key = (key >= earliest) & (key < last)
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            cell = key % BLOCK_SIZE
            keys = tl.load(
                k_cache + (block * key_block + cell * key_cell + kv_head * key_head)[None, :] + column[:, None],
                mask=is_key[None, :] & in_head[:, None],
                other=0.0,
            )
            values = tl.load(
                v_cache + (block * value_block + cell * value_cell + kv_head * value_head)[:, None] + column[None, :],
                mask=is_key[:, None] & in_head[None, :],
                other=0.0,
            )
            if k_scales is not None:
                # Integers are exact in every float type.
                keys = keys.to(q.dtype.element_ty)
                values = values.to(q.dtype.element_ty)
            values = dot_operand(values)
            score = tl.dot(query, dot_operand(keys), input_precision="tf32x3") * scale
            if k_scales is not None:
                of_head = (block * BLOCK_SIZE + cell) * kv_heads + kv_head
                score *= tl.load(k_scales + of_head, mask=is_key, other=0.0)[None, :]
            seen = attends[:, None] & is_key[None, :] & (key[None, :] <= at[:, None])
            seen = seen & (key[None, :] > at[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            better = tl.maximum(best, tl.max(score, 1))
            # A token that has seen no key yet: what is subtracted must be a number.
            shift = tl.where(better == float("-inf"), 0.0, better)
            weight = tl.exp2(score - shift[:, None])
            fade = tl.exp2(best - shift)
            total = total * fade + tl.sum(weight, 1)
            values_sum = values_sum * fade[:, None]
            if v_scales is not None:
                weight *= tl.load(v_scales + of_head, mask=is_key, other=0.0)[None, :]
            values_sum = tl.dot(to_dtype(weight, values.dtype), values, values_sum, input_precision="tf32x3")
            best = better
        flat = token.to(tl.int64) * heads + head
        if SEGMENTS == 1:
            result = tl.where((total > 0)[:, None], values_sum / tl.where(total > 0, total, 1.0)[:, None], 0.0)
            # NaN among a token's own keys must not look like no keys at all.
            result = tl.where((total != total)[:, None], float("nan"), result)
            where = out + flat[:, None] * HEAD_DIM + column[None, :]
            tl.store(where, to_dtype(result, out.dtype.element_ty), mask=is_token[:, None] & in_head[None, :])
        else:
            part = flat * SEGMENTS + segment
            tl.store(maxima + part, best, mask=is_token)
            tl.store(sums + part, total, mask=is_token)
            where = out + part[:, None] * HEAD_DIM + column[None, :]
            tl.store(where, values_sum, mask=(is_token & (best > float("-inf")))[:, None] & in_head[None, :])


@triton.jit
def combine(parts, maxima, sums, out, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """One token's head: its segments as one. A segment without a key that it sees has a maximum of -inf and is not
    read."""
    flat = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, SEGMENTS)
    column = tl.arange(0, WIDTH)
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
) -> torch.Tensor:
    """As `ops.attention`."""
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    rows, table = block_tables.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    found = launches.attention(
        tokens=tokens,
        rows=rows,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=table * block_size,
        window=window,
        block_size=block_size,
        element_bytes=q.element_size(),
        capability=launcher.capability(q),
    )
    segments = launches.segments_of(found)
    parts = maxima = sums = out
    if segments > 1:
        parts = torch.empty((tokens, heads, segments, head_dim), dtype=torch.float32, device=q.device)
        maxima, sums = torch.empty((2, tokens, heads, segments), dtype=torch.float32, device=q.device)
    tile = found[0].blocks["ROWS"] // (heads // kv_heads)
    launcher.run(
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
        out=parts,
        maxima=maxima,
        sums=sums,
        scale=scale * LOG2_E,
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
        launcher.run(combine, (tokens * heads,), found[1], parts=parts, maxima=maxima, sums=sums, out=out)
    return out
