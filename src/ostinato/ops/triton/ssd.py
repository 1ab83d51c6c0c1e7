"""`ssd_scan` and `state_update` on a GPU: a program takes some channels of one row's head through the row.

The scan goes chunk by chunk, and the state stays in registers from chunk to chunk. So there is no scratch memory,
chunks of one row wait for nothing, and a state is read and written once. The matmuls of C and B of a group are repeated
for each block of channels. Chunks begin where the reference's begin. Sums of log decays are made in float64 and kept as
two float32 numbers each, so that small differences of large sums are right.

16-bit inputs are multiplied with float32 values in TF32; float32 inputs in float32, without matrix units.

The update goes token by token. Its part of the state stays in registers from the read slot on, so it is read once and
written once per token. A row whose slots are all null is padding and costs no memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import state as launches
from ostinato.ops.launch_tables.launch import cdiv
from ostinato.ops.triton import common
from ostinato.ops.triton.common import ROW_INPUTS, checkpoint_table, rounded_stochastically, spread, step_size, to_dtype


@triton.jit
def decay_of(high, low):
    """Return exp of a log decay of two parts, clamped to 0 and -60; it counts only where that is at most 0."""
    return tl.exp(tl.minimum(tl.maximum(high + low, -60.0), 0.0))


@triton.jit
def advanced(state, x, b, step, high, low, count, time, PRECISION: tl.constexpr):
    """Return `state` [channels, columns] after `count` tokens of a chunk, of log decays `high + low`."""
    end_high = tl.sum(tl.where(time == count - 1, high, 0.0), axis=0)
    end_low = tl.sum(tl.where(time == count - 1, low, 0.0), axis=0)
    remaining = tl.where(time < count, decay_of(end_high - high, end_low - low) * step, 0.0)
    added = tl.dot(tl.trans(x * remaining[:, None]), b, input_precision=PRECISION)
    return state * decay_of(end_high, end_low) + added


@triton.jit(do_not_specialize=["noise", "rows"], do_not_specialize_on_alignment=ROW_INPUTS)
def ssd_scan_kernel(
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    states,
    row_starts,
    start_positions,
    read_slots,
    write_slots,
    checkpoints,
    out,
    low_limit,
    high_limit,
    noise,
    rows,
    heads_per_group,
    head_dim,
    state_size,
    stride_x,
    stride_x_head,
    stride_dt,
    stride_b,
    stride_b_group,
    stride_c,
    stride_c_group,
    stride_write,
    HAS_NOISE: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Scan some channels of one row's head; a chunk has `LENGTH` tokens, padded to `TOKENS`, a power of two."""
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if start < end:
        group = head // heads_per_group
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
        column = tl.arange(0, COLUMNS)
        time = tl.arange(0, TOKENS)
        in_head, in_state = channel < head_dim, column < state_size
        inside = in_head[:, None] & in_state[None, :]
        slot_elements = heads.to(tl.int64) * head_dim * state_size
        place = (head * head_dim + channel)[:, None] * state_size + column[None, :]
        decay_rate = -tl.exp(tl.load(A_log + head))
        skip, bias = tl.load(D + head), tl.load(dt_bias + head)
        read, write = tl.load(read_slots + row).to(tl.int64), tl.load(write_slots + row * stride_write).to(tl.int64)
        before = tl.load(start_positions + row) - start  # A token's position less its index in the step.
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0).to(tl.float32)
        token = start
        while token < end:
            stop = tl.minimum(end, token + LENGTH - (before + token) % LENGTH)
            count = stop - token
            at = (token + time).to(tl.int64)
            there = time < count
            step = tl.load(dt + at * stride_dt + head, mask=there, other=0.0)
            step = tl.where(there, step_size(step, bias, low_limit, high_limit), 0.0)
            log_decay = tl.cumsum((step * decay_rate).to(tl.float64), axis=0)
            high = log_decay.to(tl.float32)
            low = (log_decay - high.to(tl.float64)).to(tl.float32)
            from_x = x + at[:, None] * stride_x + head * stride_x_head + channel[None, :]
            value = tl.load(from_x, mask=there[:, None] & in_head[None, :], other=0.0).to(tl.float32)
            given = there[:, None] & in_state[None, :]
            from_b = B + at[:, None] * stride_b + group * stride_b_group + column[None, :]
            b = tl.load(from_b, mask=given, other=0.0).to(tl.float32)
            from_c = C + at[:, None] * stride_c + group * stride_c_group + column[None, :]
            c = tl.load(from_c, mask=given, other=0.0).to(tl.float32)

            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)  # [t, s]
            decays = decay_of(high[:, None] - high[None, :], low[:, None] - low[None, :])
            weights = tl.where(time[:, None] >= time[None, :], scores * decays * step[None, :], 0.0)
            carried = tl.dot(c, tl.trans(state), input_precision=PRECISION) * decay_of(high, low)[:, None]
            y = carried + tl.dot(weights, value, input_precision=PRECISION) + skip * value
            to = out + (at[:, None] * heads + head) * head_dim + channel[None, :]
            tl.store(to, to_dtype(y, out.dtype.element_ty), mask=there[:, None] & in_head[None, :])

            channels_of_layer = head * head_dim + channel
            if checkpoints is not None:
                first, last = tl.load(checkpoints + row), tl.load(checkpoints + row + 1)
                for i in range(first, last):
                    entry = checkpoints + rows + 1 + 2 * i
                    until = start + tl.load(entry)
                    if (until > token) & (until <= stop):
                        partial = advanced(state, value, b, step, high, low, until - token, time, PRECISION)
                        kept = rounded_stochastically(
                            partial,
                            channels_of_layer,
                            column,
                            before + until - 1,
                            noise,
                            state_size,
                            states.dtype.element_ty,
                            HAS_NOISE,
                        )
                        slot = tl.load(entry + 1).to(tl.int64)
                        tl.store(states + slot * slot_elements + place, kept, mask=inside)
            state = advanced(state, value, b, step, high, low, count, time, PRECISION)
            kept = rounded_stochastically(
                state,
                channels_of_layer,
                column,
                before + stop - 1,
                noise,
                state_size,
                states.dtype.element_ty,
                HAS_NOISE,
            )
            state = kept.to(tl.float32)
            token = stop
        tl.store(states + write * slot_elements + place, to_dtype(state, states.dtype.element_ty), mask=inside)


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunk_size: int,
    ssm_states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    recurrent: bool = False,
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute `ops.ssd_scan`; its reference documents arguments and result.

    `recurrent` is not supported: the plan refuses `deterministic` with Triton kernels.
    """
    assert not packable, common.NOT_PACKABLE
    row_starts = row_starts - row_starts[:1]  # Other rows may come first.
    assert not recurrent, "the Triton scan is made of chunks"
    heads, head_dim, state_size = ssm_states.shape[1:]
    rows = read_slots.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    keeps_float32 = ssm_states.dtype == torch.float32
    (launch,) = launches.ssd_scan_launches(
        chunk_size=chunk_size,
        head_dim=head_dim,
        state_size=state_size,
        element_bytes=x.element_size(),
        capability=common.capability(x),
    )
    has_noise = noise is not None and not keeps_float32
    table, _ = checkpoint_table(checkpoints, 0, rows, x.device)
    common.run(
        ssd_scan_kernel,
        (rows, heads, cdiv(head_dim, launch.blocks["CHANNELS"])),
        launch,
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=ssm_states,
        row_starts=row_starts,
        start_positions=start_positions,
        read_slots=read_slots,
        write_slots=write_slots,
        checkpoints=table,
        out=out,
        low_limit=float(dt_limit[0]),
        high_limit=float(dt_limit[1]),
        noise=noise if has_noise else 0,
        rows=rows,
        heads_per_group=heads // B.shape[1],
        head_dim=head_dim,
        state_size=state_size,
        stride_x=x.stride(0),
        stride_x_head=x.stride(1),
        stride_dt=dt.stride(0),
        stride_b=B.stride(0),
        stride_b_group=B.stride(1),
        stride_c=C.stride(0),
        stride_c_group=C.stride(1),
        stride_write=write_slots.stride(0),
        HAS_NOISE=has_noise,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )
    return out


@triton.jit(do_not_specialize=["noise"])
def state_update_kernel(
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    states,
    read_slots,
    write_slots,
    start_positions,
    out,
    low,
    high,
    noise,
    tokens,
    heads_per_group,
    head_dim,
    state_size,
    stride_x,
    stride_x_head,
    stride_dt,
    stride_b,
    stride_b_group,
    stride_c,
    stride_c_group,
    stride_write,
    HAS_NOISE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    group = head // heads_per_group
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    in_head = channel < head_dim
    inside = in_head[:, None] & (column < state_size)[None, :]
    slot_elements = heads.to(tl.int64) * head_dim * state_size
    place = (head * head_dim + channel)[:, None] * state_size + column[None, :]

    i = tl.arange(0, TOKENS)
    written = tl.load(write_slots + row * stride_write + i, mask=i < tokens, other=0)
    read = tl.load(read_slots + row).to(tl.int64)
    first = row.to(tl.int64) * tokens
    if (read == 0) & (tl.max(written, axis=0) == 0):
        for t in range(tokens):
            to = out + ((first + t) * heads + head) * head_dim + channel
            tl.store(to, tl.zeros([CHANNELS], out.dtype.element_ty), mask=in_head)
    else:
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0).to(tl.float32)
        decay_rate = -tl.exp(tl.load(A_log + head))
        skip = tl.load(D + head)
        bias = tl.load(dt_bias + head)
        for t in range(tokens):
            token = first + t
            step = step_size(tl.load(dt + token * stride_dt + head), bias, low, high)
            value = tl.load(x + token * stride_x + head * stride_x_head + channel, mask=in_head, other=0.0)
            value = value.to(tl.float32)
            b = tl.load(B + token * stride_b + group * stride_b_group + column, mask=column < state_size, other=0.0)
            c = tl.load(C + token * stride_c + group * stride_c_group + column, mask=column < state_size, other=0.0)
            state = state * tl.exp(step * decay_rate) + (step * value)[:, None] * b.to(tl.float32)[None, :]
            y = tl.sum(state * c.to(tl.float32)[None, :], axis=1) + skip * value
            tl.store(out + (token * heads + head) * head_dim + channel, to_dtype(y, out.dtype.element_ty), mask=in_head)
            position = tl.load(start_positions + row) + t if HAS_NOISE else t
            kept = rounded_stochastically(
                state,
                head * head_dim + channel,
                column,
                position,
                noise,
                state_size,
                states.dtype.element_ty,
                HAS_NOISE,
            )
            write = tl.load(write_slots + row * stride_write + t).to(tl.int64)
            tl.store(states + write * slot_elements + place, kept, mask=inside)
            state = kept.to(tl.float32)


def state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    ssm_states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute `ops.state_update`; its reference documents arguments and result."""
    assert not packable, common.NOT_PACKABLE
    heads, head_dim, state_size = ssm_states.shape[1:]
    rows, tokens = write_slots.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_noise = noise is not None and ssm_states.dtype != torch.float32
    assert start_positions is not None or not has_noise, "noise is a function of positions"
    (launch,) = launches.state_update_launches(
        rows=rows, num_heads=heads, head_dim=head_dim, state_size=state_size, capability=common.capability(x)
    )
    common.run(
        state_update_kernel,
        (rows, heads, cdiv(head_dim, launch.blocks["CHANNELS"])),
        launch,
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=ssm_states,
        read_slots=read_slots,
        write_slots=write_slots,
        start_positions=start_positions if has_noise else None,
        out=out,
        low=float(dt_limit[0]),
        high=float(dt_limit[1]),
        noise=noise if has_noise else 0,
        tokens=tokens,
        heads_per_group=heads // B.shape[1],
        head_dim=head_dim,
        state_size=state_size,
        stride_x=x.stride(0),
        stride_x_head=x.stride(1),
        stride_dt=dt.stride(0),
        stride_b=B.stride(0),
        stride_b_group=B.stride(1),
        stride_c=C.stride(0),
        stride_c_group=C.stride(1),
        stride_write=write_slots.stride(0),
        HAS_NOISE=has_noise,
        TOKENS=launches.token_block(tokens),
    )
    return out
