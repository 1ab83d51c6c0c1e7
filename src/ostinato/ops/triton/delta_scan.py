"""delta_scan: a program takes some value channels of one row's head through the row, chunk by chunk.

The state stays in registers from chunk to chunk: it is read and written once, and there is no scratch memory. A chunk's
triangular system is solved token by token. Sums of log decays are made in float64 and kept as two float32 numbers each,
so that small differences of large sums are right. The products of keys and queries are made again for each block of
value channels.

16-bit inputs are multiplied by what is in float32 in TF32; float32 inputs in float32, without matrix units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import state as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.delta_rule import beta_of, log_decay, unit
from ostinato.ops.triton.launcher import spread, to_dtype
from ostinato.ops.triton.ragged import checkpoint_table
from ostinato.ops.triton.ssd_scan import decay_of


@triton.jit
def after(state, key, change, high, low, count, time, PRECISION: tl.constexpr):
    """`state` [keys, columns] after the first `count` of a chunk's tokens, whose log decays are `high + low`
    [tokens, 1 or keys]."""
    is_last = (time == count - 1)[:, None]
    end_high, end_low = tl.sum(tl.where(is_last, high, 0.0), axis=0), tl.sum(tl.where(is_last, low, 0.0), axis=0)
    remaining = tl.where((time < count)[:, None], decay_of(end_high[None, :] - high, end_low[None, :] - low), 0.0)
    added = tl.dot(tl.trans(key * remaining), change, input_precision=PRECISION)
    return state * decay_of(end_high, end_low)[:, None] + added


@triton.jit
def delta_scan_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    states,
    row_starts,
    start_positions,
    read_slots,
    write_slots,
    checkpoints,
    out,
    beta_scale,
    scale,
    rows,
    heads_per_key,
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
        key_head = head // heads_per_key
        channel = tl.arange(0, KEYS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        time = tl.arange(0, TOKENS)
        in_key, in_value = channel < key_dim, column < value_dim
        inside = in_key[:, None] & in_value[None, :]
        slot_elements = heads.to(tl.int64) * key_dim * value_dim
        place = (head * key_dim + channel)[:, None] * value_dim + column[None, :]
        rate = tl.load(A_log + head)
        read, write = tl.load(read_slots + row).to(tl.int64), tl.load(write_slots + row * stride_write).to(tl.int64)
        before = tl.load(start_positions + row) - start  # a token's position, less its number
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0)
        token = start
        while token < end:
            stop = tl.minimum(end, token + TOKENS - (before + token) % TOKENS)
            count = stop - token
            at = (token + time).to(tl.int64)
            there = time < count
            is_key = there[:, None] & in_key[None, :]
            is_value = there[:, None] & in_value[None, :]
            from_k = k + at[:, None] * stride_k + key_head * stride_k_head + channel[None, :]
            key = unit(tl.load(from_k, mask=is_key, other=0.0), 1)
            from_q = q + at[:, None] * stride_q + key_head * stride_q_head + channel[None, :]
            from_v = v + at[:, None] * stride_v + head * stride_v_head + column[None, :]
            value = tl.load(from_v, mask=is_value, other=0.0).to(tl.float32)
            beta = beta_of(tl.load(b + at * stride_b + head, mask=there, other=0.0), beta_scale)
            beta = tl.where(there, beta, 0.0)

            # [t, s]: what a key or query at t finds of the key at s, which has decayed since.
            if PER_CHANNEL:
                from_a = a + at[:, None] * stride_a + head * stride_a_head + channel[None, :]
                bias = tl.load(dt_bias + head * key_dim + channel, mask=in_key, other=0.0)
                logs = log_decay(tl.load(from_a, mask=is_key, other=0.0), bias[None, :], rate)
                sums = tl.cumsum(tl.where(is_key, logs, 0.0).to(tl.float64), axis=0)
                high = sums.to(tl.float32)
                low = (sums - high.to(tl.float64)).to(tl.float32)
                query = unit(tl.load(from_q, mask=is_key, other=0.0), 1) * scale
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
            else:
                logs = log_decay(
                    tl.load(a + at * stride_a + head * stride_a_head, mask=there, other=0.0),
                    tl.load(dt_bias + head),
                    rate,
                )
                sums = tl.cumsum(tl.where(there, logs, 0.0).to(tl.float64), axis=0)
                high = sums.to(tl.float32)
                low = (sums - high.to(tl.float64)).to(tl.float32)
                apart = decay_of(high[:, None] - high[None, :], low[:, None] - low[None, :])
                by_key = tl.dot(key, tl.trans(key), input_precision=PRECISION) * apart
                high, low = high[:, None], low[:, None]
            by_key = tl.where(time[:, None] > time[None, :], by_key * beta[:, None], 0.0)

            reach = decay_of(high, low)
            change = beta[:, None] * (value - tl.dot(key * reach, state, input_precision=PRECISION))
            for t in range(1, TOKENS):
                weights = tl.sum(tl.where((time == t)[:, None], by_key, 0.0), axis=0)
                known = tl.sum(weights[:, None] * change, axis=0)
                change = tl.where((time == t)[:, None], change - known[None, :], change)
            if not PER_CHANNEL:  # the query takes registers from here on only
                query = unit(tl.load(from_q, mask=is_key, other=0.0), 1) * scale
                by_query = tl.dot(query, tl.trans(key), input_precision=PRECISION) * apart
            by_query = tl.where(time[:, None] >= time[None, :], by_query, 0.0)
            y = tl.dot(query * reach, state, input_precision=PRECISION)
            y += tl.dot(by_query, change, input_precision=PRECISION)
            to = out + (at[:, None] * heads + head) * value_dim + column[None, :]
            tl.store(to, to_dtype(y, out.dtype.element_ty), mask=is_value)

            if checkpoints is not None:
                begin_of_row, end_of_row = tl.load(checkpoints + row), tl.load(checkpoints + row + 1)
                for i in range(begin_of_row, end_of_row):
                    entry = checkpoints + rows + 1 + 2 * i
                    until = start + tl.load(entry)
                    if (until > token) & (until <= stop):
                        partial = after(state, key, change, high, low, until - token, time, PRECISION)
                        slot = tl.load(entry + 1).to(tl.int64)
                        tl.store(states + slot * slot_elements + place, partial, mask=inside)
            state = after(state, key, change, high, low, count, time, PRECISION)
            token = stop
        tl.store(states + write * slot_elements + place, state, mask=inside)


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_scale: float,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """See the reference."""
    assert states.dtype == torch.float32, f"states of a delta net in {states.dtype}; use float32"
    heads, key_dim, value_dim = states.shape[1:]
    rows = read_slots.shape[0]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    (launch,) = launches.delta_scan(
        key_dim=key_dim,
        value_dim=value_dim,
        capability=launcher.capability(v),
    )
    table, _ = checkpoint_table(checkpoints, 0, rows, v.device)
    launcher.run(
        delta_scan_kernel,
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
        row_starts=row_starts,
        start_positions=start_positions,
        read_slots=read_slots,
        write_slots=write_slots,
        checkpoints=table,
        out=out,
        beta_scale=float(beta_scale),
        scale=key_dim**-0.5,
        rows=rows,
        heads_per_key=heads // k.shape[1],
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
        PER_CHANNEL=a.dim() == 3,
        PRECISION="ieee" if v.dtype == torch.float32 else "tf32",
    )
    return out
