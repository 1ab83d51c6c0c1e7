"""`delta_scan` and `delta_update` on a GPU.

The scan has two kernels, one for the state-independent work of all chunks, one for the pass along each row. The second
takes some value columns of one row's head through the row, chunk by chunk. With the names of the reference, X the
inverse of the unit lower triangular system of a chunk, and E the sum of its log decays (Yang et al. 2024, arXiv
2412.06464, section 3.3):

    U = X beta v;  W = X beta e^L k;  P_ts = q_t . e^(L_t - L_s) k_s  where s <= t               (first kernel)
    d = U - W S;  o = e^L q S + P d;  S <- e^E S + (e^(E - L) k)^T d                             (second kernel)

The second holds the state in registers and nothing else that is large. The results of the first are in scratch memory,
in float32 (`triton_scratch.delta_scan`). Chunks have 16 tokens and begin at absolute multiples of 16, and so do
checkpoints: each ends a chunk. Sums of log decays are made in float64 and kept as two float32 numbers each, so that
small differences of large sums are right.

16-bit inputs are multiplied in TF32. float32 inputs are multiplied without matrix units: three TF32 matmuls, which
would keep errors below 1e-5, need more registers than there are.

In the update, a program takes some value channels of one row's head through all tokens of the row. Its part of the
state stays in registers from the read slot on, so it is read once and written once per token. A row whose slots are all
null is padding and costs no memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import state as launches
from ostinato.ops.launch_tables.launch import cdiv
from ostinato.ops.triton import common
from ostinato.ops.triton.common import ROW_INPUTS, checkpoint_table, chunk_of, first_chunk, spread, step_size, to_dtype
from ostinato.ops.triton.ssd import decay_of


@triton.jit
def unit(x, axis: tl.constexpr):
    """Divide each vector of `x` along `axis`, the last one, by its length, in float32."""
    x = x.to(tl.float32)
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, axis=axis) + 1e-6), axis)


@triton.jit
def log_decay(a, bias, A_log, BOUND: tl.constexpr):
    """Return the logarithm of a decay, at most 0, in float32."""
    if BOUND < 0:
        logarithm = BOUND / (1.0 + tl.exp(-tl.exp(A_log) * (a.to(tl.float32) + bias)))
    else:
        logarithm = -tl.exp(A_log) * step_size(a, bias, 0.0, float("inf"))
    return logarithm


@triton.jit
def beta_of(b, scale):
    """Return scale sigmoid(b), in float32."""
    return scale / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def delta_update_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    states,
    read_slots,
    write_slots,
    out,
    beta_scale,
    scale,
    tokens,
    heads_per_key,
    key_heads,
    key_dim,
    value_dim,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_a,
    stride_a_head,
    stride_b,
    stride_write,
    BOUND: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    key_head = (head // heads_per_key) % key_heads
    channel = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = channel < key_dim, column < value_dim
    inside = in_key[:, None] & in_value[None, :]
    slot_elements = heads.to(tl.int64) * key_dim * value_dim
    place = (head * key_dim + channel)[:, None] * value_dim + column[None, :]

    i = tl.arange(0, TOKENS)
    written = tl.load(write_slots + row * stride_write + i, mask=i < tokens, other=0)
    read = tl.load(read_slots + row).to(tl.int64)
    first = row.to(tl.int64) * tokens
    if (read == 0) & (tl.max(written, axis=0) == 0):
        for t in range(tokens):
            to = out + ((first + t) * heads + head) * value_dim + column
            tl.store(to, tl.zeros([COLUMNS], out.dtype.element_ty), mask=in_value)
    else:
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0)
        rate = tl.load(A_log + head)
        for t in range(tokens):
            token = first + t
            key = tl.load(k + token * stride_k + key_head * stride_k_head + channel, mask=in_key, other=0.0)
            query = tl.load(q + token * stride_q + key_head * stride_q_head + channel, mask=in_key, other=0.0)
            key, query = unit(key, 0), unit(query, 0) * scale
            value = tl.load(v + token * stride_v + head * stride_v_head + column, mask=in_value, other=0.0)
            beta = beta_of(tl.load(b + token * stride_b + head), beta_scale)
            if PER_CHANNEL:
                raw = tl.load(a + token * stride_a + head * stride_a_head + channel, mask=in_key, other=0.0)
                bias = tl.load(dt_bias + head * key_dim + channel, mask=in_key, other=0.0)
                state = state * tl.exp(log_decay(raw, bias, rate, BOUND))[:, None]
            else:
                raw, bias = tl.load(a + token * stride_a + head * stride_a_head), tl.load(dt_bias + head)
                state = state * tl.exp(log_decay(raw, bias, rate, BOUND))
            held = tl.sum(state * key[:, None], axis=0)
            state = state + key[:, None] * (beta * (value.to(tl.float32) - held))[None, :]
            y = tl.sum(state * query[:, None], axis=0)
            to = out + (token * heads + head) * value_dim + column
            tl.store(to, to_dtype(y, out.dtype.element_ty), mask=in_value)
            write = tl.load(write_slots + row * stride_write + t).to(tl.int64)
            tl.store(states + write * slot_elements + place, state, mask=inside)


def delta_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    decay_bound: float,
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute `ops.delta_update`; its reference documents arguments and result."""
    assert not packable, common.NOT_PACKABLE
    assert states.dtype == torch.float32, f"states of a delta net in {states.dtype}; use float32"
    heads, key_dim, value_dim = states.shape[1:]
    rows, tokens = write_slots.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    (launch,) = launches.delta_update_launches(
        rows=rows, num_heads=heads, key_dim=key_dim, value_dim=value_dim, capability=common.capability(v)
    )
    common.run(
        delta_update_kernel,
        (rows, heads, cdiv(value_dim, launch.blocks["COLUMNS"])),
        launch,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        states=states,
        read_slots=read_slots,
        write_slots=write_slots,
        out=out,
        beta_scale=float(beta_scale),
        scale=key_dim**-0.5,
        tokens=tokens,
        heads_per_key=1 if keys_take_turns else heads // k.shape[1],
        key_heads=k.shape[1],
        key_dim=key_dim,
        value_dim=value_dim,
        stride_q=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v=v.stride(0),
        stride_v_head=v.stride(1),
        stride_a=a.stride(0),
        stride_a_head=a.stride(1),
        stride_b=b.stride(0),
        stride_write=write_slots.stride(0),
        BOUND=decay_bound,
        PER_CHANNEL=a.dim() == 3,
        TOKENS=launches.token_block(tokens),
    )
    return out


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ROW_INPUTS)
def delta_chunk_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    row_starts,
    start_positions,
    work,
    ends,
    beta_scale,
    scale,
    rows,
    heads_per_key,
    key_heads,
    key_dim,
    value_dim,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_a,
    stride_a_head,
    stride_b,
    stride_work,
    stride_work_head,
    BOUND: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the state-independent terms of one chunk and head.

    `work` [tokens, heads, ...] has W, e^L q, e^(E - L) k, U and P of each token side by side; `ends` [chunks, heads, 1
    or key_dim] has E, as its exponential.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    _, token, stop = chunk_of(index, row_starts, start_positions, rows, TOKENS, SPAN)
    if token < stop:
        count = stop - token
        key_head = (head // heads_per_key) % key_heads
        channel, time = tl.arange(0, KEYS), tl.arange(0, TOKENS)
        in_key, there = channel < key_dim, time < count
        at = (token + time).to(tl.int64)
        is_key = there[:, None] & in_key[None, :]
        from_k = k + at[:, None] * stride_k + key_head * stride_k_head + channel[None, :]
        key = unit(tl.load(from_k, mask=is_key, other=0.0), 1)
        from_q = q + at[:, None] * stride_q + key_head * stride_q_head + channel[None, :]
        query = unit(tl.load(from_q, mask=is_key, other=0.0), 1) * scale
        beta = beta_of(tl.load(b + at * stride_b + head, mask=there, other=0.0), beta_scale)
        beta = tl.where(there, beta, 0.0)
        rate = tl.load(A_log + head)
        to_work = work + at * stride_work + head * stride_work_head
        to_end = ends + (index.to(tl.int64) * heads + head) * (key_dim if PER_CHANNEL else 1)

        # [t, s]: scores of a key or query at t with the key at s, which has decayed since.
        if PER_CHANNEL:
            from_a = a + at[:, None] * stride_a + head * stride_a_head + channel[None, :]
            bias = tl.load(dt_bias + head * key_dim + channel, mask=in_key, other=0.0)
            logs = log_decay(tl.load(from_a, mask=is_key, other=0.0), bias[None, :], rate, BOUND)
            sums = tl.cumsum(tl.where(is_key, logs, 0.0).to(tl.float64), axis=0)
            high = sums.to(tl.float32)
            low = (sums - high.to(tl.float64)).to(tl.float32)
            by_key = tl.zeros([TOKENS, TOKENS], tl.float32)
            by_query = tl.zeros([TOKENS, TOKENS], tl.float32)
            for s in range(TOKENS):
                is_s = (time == s)[:, None]
                of_s = tl.sum(tl.where(is_s, key, 0.0), axis=0)
                high_s = tl.sum(tl.where(is_s, high, 0.0), axis=0)
                low_s = tl.sum(tl.where(is_s, low, 0.0), axis=0)
                decayed = of_s[None, :] * decay_of(high - high_s[None, :], low - low_s[None, :])
                in_s = (time == s)[None, :]
                by_key = tl.where(in_s, tl.sum(key * decayed, axis=1)[:, None], by_key)
                by_query = tl.where(in_s, tl.sum(query * decayed, axis=1)[:, None], by_query)
            # After the last token the sums stay constant.
            end_high = tl.sum(tl.where((time == TOKENS - 1)[:, None], high, 0.0), axis=0)
            end_low = tl.sum(tl.where((time == TOKENS - 1)[:, None], low, 0.0), axis=0)
            tl.store(to_end + channel, decay_of(end_high, end_low), mask=in_key)
            reach, remaining = decay_of(high, low), decay_of(end_high[None, :] - high, end_low[None, :] - low)
        else:
            raw = tl.load(a + at * stride_a + head * stride_a_head, mask=there, other=0.0)
            logs = log_decay(raw, tl.load(dt_bias + head), rate, BOUND)
            sums = tl.cumsum(tl.where(there, logs, 0.0).to(tl.float64), axis=0)
            high = sums.to(tl.float32)
            low = (sums - high.to(tl.float64)).to(tl.float32)
            apart = decay_of(high[:, None] - high[None, :], low[:, None] - low[None, :])
            by_key = tl.dot(key, tl.trans(key), input_precision=PRECISION) * apart
            by_query = tl.dot(query, tl.trans(key), input_precision=PRECISION) * apart
            end_high = tl.sum(tl.where(time == TOKENS - 1, high, 0.0), axis=0)
            end_low = tl.sum(tl.where(time == TOKENS - 1, low, 0.0), axis=0)
            tl.store(to_end, decay_of(end_high, end_low))
            reach, remaining = decay_of(high, low)[:, None], decay_of(end_high - high, end_low - low)[:, None]

        to_keys = to_work[:, None] + channel[None, :]
        tl.store(to_keys + key_dim, query * reach, mask=is_key)
        tl.store(to_keys + 2 * key_dim, key * remaining, mask=is_key)
        to_scores = to_work[:, None] + 3 * key_dim + value_dim + time[None, :]
        by_query = tl.where(time[:, None] >= time[None, :], by_query, 0.0)
        tl.store(to_scores, by_query, mask=there[:, None] & (time >= 0)[None, :])

        # The inverse is computed row by row; each row needs those before it.
        by_key = tl.where(time[:, None] > time[None, :], by_key * beta[:, None], 0.0)
        inverse = tl.where(time[:, None] == time[None, :], 1.0, 0.0)
        for t in range(1, TOKENS):
            is_t = (time == t)[:, None]
            weights = tl.sum(tl.where(is_t, by_key, 0.0), axis=0)
            known = tl.sum(weights[:, None] * inverse, axis=0)
            inverse = tl.where(is_t, inverse - known[None, :], inverse)
        inverse = inverse * beta[None, :]
        tl.store(to_keys, tl.dot(inverse, key * reach, input_precision=PRECISION), mask=is_key)
        for first in range(0, value_dim, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_value = there[:, None] & (column < value_dim)[None, :]
            from_v = v + at[:, None] * stride_v + head * stride_v_head + column[None, :]
            value = tl.load(from_v, mask=is_value, other=0.0).to(tl.float32)
            added = tl.dot(inverse, value, input_precision=PRECISION)
            tl.store(to_work[:, None] + 3 * key_dim + column[None, :], added, mask=is_value)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ROW_INPUTS)
def delta_scan_kernel(
    work,
    ends,
    states,
    row_starts,
    start_positions,
    read_slots,
    write_slots,
    checkpoints,
    out,
    rows,
    key_dim,
    value_dim,
    stride_work,
    stride_work_head,
    stride_write,
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if start < end:
        channel, time = tl.arange(0, KEYS), tl.arange(0, TOKENS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        in_key, in_value = channel < key_dim, column < value_dim
        inside = in_key[:, None] & in_value[None, :]
        slot_elements = heads.to(tl.int64) * key_dim * value_dim
        place = (head * key_dim + channel)[:, None] * value_dim + column[None, :]
        read, write = tl.load(read_slots + row).to(tl.int64), tl.load(write_slots + row * stride_write).to(tl.int64)
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0)
        index = first_chunk(row, start, tl.load(row_starts), TOKENS)
        begin = start - tl.load(start_positions + row) % TOKENS
        while begin < end:
            token, stop = tl.maximum(begin, start), tl.minimum(begin + TOKENS, end)
            at = (token + time).to(tl.int64)
            there = time < stop - token
            is_key, is_value = there[:, None] & in_key[None, :], there[:, None] & in_value[None, :]
            of_token = work + at[:, None] * stride_work + head * stride_work_head
            keys = of_token + channel[None, :]
            change = tl.load(of_token + 3 * key_dim + column[None, :], mask=is_value, other=0.0)
            expected = tl.load(keys, mask=is_key, other=0.0)
            change -= tl.dot(expected, state, input_precision=PRECISION)
            query = tl.load(keys + key_dim, mask=is_key, other=0.0)
            y = tl.dot(query, state, input_precision=PRECISION)
            from_scores = of_token + 3 * key_dim + value_dim + time[None, :]
            scores = tl.load(from_scores, mask=there[:, None] & (time >= 0)[None, :], other=0.0)
            y += tl.dot(scores, change, input_precision=PRECISION)
            to = out + (at[:, None] * heads + head) * value_dim + column[None, :]
            tl.store(to, to_dtype(y, out.dtype.element_ty), mask=is_value)

            of_chunk = ends + (index.to(tl.int64) * heads + head) * (key_dim if PER_CHANNEL else 1)
            if PER_CHANNEL:
                state = state * tl.load(of_chunk + channel, mask=in_key, other=0.0)[:, None]
            else:
                state = state * tl.load(of_chunk)
            key = tl.load(keys + 2 * key_dim, mask=is_key, other=0.0)
            state += tl.dot(tl.trans(key), change, input_precision=PRECISION)
            if checkpoints is not None:
                for i in range(tl.load(checkpoints + row), tl.load(checkpoints + row + 1)):
                    entry = checkpoints + rows + 1 + 2 * i
                    if start + tl.load(entry) == stop:
                        slot = tl.load(entry + 1).to(tl.int64)
                        tl.store(states + slot * slot_elements + place, state, mask=inside)
            begin += TOKENS
            index += 1
        tl.store(states + write * slot_elements + place, state, mask=inside)


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    decay_bound: float,
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    packable: bool = False,
) -> torch.Tensor:
    """Compute `ops.delta_scan`; its reference documents arguments and result.

    A checkpoint is at a multiple of 16 of its request's positions, or at its row's end.
    """
    assert not packable, common.NOT_PACKABLE
    row_starts = row_starts - row_starts[:1]  # Other rows may come first.
    assert states.dtype == torch.float32, f"states of a delta net in {states.dtype}; use float32"
    heads, key_dim, value_dim = states.shape[1:]
    tokens, rows, per_channel = v.shape[0], read_slots.shape[0], a.dim() == 3
    precision = "ieee" if v.dtype == torch.float32 else "tf32"
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    of_chunks, of_rows = launches.delta_scan_launches(
        key_dim=key_dim,
        value_dim=value_dim,
        element_bytes=v.element_size(),
        capability=common.capability(v),
        per_channel=per_channel,
    )
    chunks = tokens // launches.DELTA_TOKENS + 2 * rows
    width = 3 * key_dim + value_dim + launches.DELTA_TOKENS
    work = torch.empty(tokens, heads, width, dtype=torch.float32, device=v.device)
    ends = torch.empty(chunks, heads, key_dim if per_channel else 1, dtype=torch.float32, device=v.device)
    shared = {
        "row_starts": row_starts,
        "start_positions": start_positions,
        "work": work,
        "ends": ends,
        "rows": rows,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "stride_work": work.stride(0),
        "stride_work_head": work.stride(1),
        "PER_CHANNEL": per_channel,
    }
    common.run(
        delta_chunk_kernel,
        (chunks if rows else 0, heads),
        of_chunks,
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        beta_scale=float(beta_scale),
        scale=key_dim**-0.5,
        heads_per_key=1 if keys_take_turns else heads // k.shape[1],
        key_heads=k.shape[1],
        stride_q=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v=v.stride(0),
        stride_v_head=v.stride(1),
        stride_a=a.stride(0),
        stride_a_head=a.stride(1),
        stride_b=b.stride(0),
        BOUND=decay_bound,
        PRECISION=precision,
        **shared,
    )
    table, _ = checkpoint_table(checkpoints, 0, rows, v.device)
    common.run(
        delta_scan_kernel,
        (rows, heads, cdiv(value_dim, of_rows.blocks["COLUMNS"])),
        of_rows,
        states=states,
        read_slots=read_slots,
        write_slots=write_slots,
        checkpoints=table,
        out=out,
        stride_write=write_slots.stride(0),
        PRECISION=precision,
        **shared,
    )
    return out
