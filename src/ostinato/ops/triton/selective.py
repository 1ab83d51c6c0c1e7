"""`selective_scan` and `selective_update` on a GPU: a program takes some channels of one row through the row.

It goes token by token, and its part of the state stays in registers; a token's inputs are read when they are needed.
There is no scratch memory. The scan reads a state once, and writes it only to the slots that need it; the update writes
it once per token. A row whose slots are all null is padding and costs no memory traffic.
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
def advanced(state, rates, step, value, b):
    """Return `state` [channels, columns] after one token, given its steps and inputs by channel and B by column."""
    return state * tl.exp(step[:, None] * rates) + (step * value)[:, None] * b[None, :]


@triton.jit(do_not_specialize=["noise"])
def selective_update_kernel(
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
    noise,
    tokens,
    channels,
    state_size,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_write,
    HAS_NOISE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    there, in_state = channel < channels, column < state_size
    inside = there[:, None] & in_state[None, :]
    slot_elements = tl.cast(channels, tl.int64) * state_size
    place = channel[:, None] * state_size + column[None, :]

    i = tl.arange(0, TOKENS)
    written = tl.load(write_slots + row * stride_write + i, mask=i < tokens, other=0)
    read = tl.load(read_slots + row).to(tl.int64)
    first = row.to(tl.int64) * tokens
    if (read == 0) & (tl.max(written, axis=0) == 0):
        for t in range(tokens):
            tl.store(out + (first + t) * channels + channel, tl.zeros([CHANNELS], out.dtype.element_ty), mask=there)
    else:
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0).to(tl.float32)
        rates = -tl.exp(tl.load(A_log + place, mask=inside, other=0.0))
        skip = tl.load(D + channel, mask=there, other=0.0)
        bias = tl.load(dt_bias + channel, mask=there, other=0.0)
        for t in range(tokens):
            token = first + t
            raw = tl.load(dt + token * stride_dt + channel, mask=there, other=0.0)
            step = step_size(raw, bias, 0.0, float("inf"))
            value = tl.load(x + token * stride_x + channel, mask=there, other=0.0).to(tl.float32)
            b = tl.load(B + token * stride_b + column, mask=in_state, other=0.0).to(tl.float32)
            c = tl.load(C + token * stride_c + column, mask=in_state, other=0.0).to(tl.float32)
            state = advanced(state, rates, step, value, b)
            y = tl.sum(state * c[None, :], axis=1) + skip * value
            tl.store(out + token * channels + channel, to_dtype(y, out.dtype.element_ty), mask=there)
            position = tl.load(start_positions + row) + t if HAS_NOISE else t
            kept = rounded_stochastically(
                state, channel, column, position, noise, state_size, states.dtype.element_ty, HAS_NOISE
            )
            write = tl.load(write_slots + row * stride_write + t).to(tl.int64)
            tl.store(states + write * slot_elements + place, kept, mask=inside)
            state = kept.to(tl.float32)


def selective_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute `ops.selective_update`; its reference documents arguments and result."""
    assert not packable, common.NOT_PACKABLE
    channels, state_size = states.shape[1:]
    rows, tokens = write_slots.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_noise = noise is not None and states.dtype != torch.float32
    assert start_positions is not None or not has_noise, "noise is a function of positions"
    (launch,) = launches.selective_update_launches(
        rows=rows, channels=channels, state_size=state_size, capability=common.capability(x)
    )
    common.run(
        selective_update_kernel,
        (rows, cdiv(channels, launch.blocks["CHANNELS"])),
        launch,
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=states,
        read_slots=read_slots,
        write_slots=write_slots,
        start_positions=start_positions if has_noise else None,
        out=out,
        noise=noise if has_noise else 0,
        tokens=tokens,
        channels=channels,
        state_size=state_size,
        stride_x=x.stride(0),
        stride_dt=dt.stride(0),
        stride_b=B.stride(0),
        stride_c=C.stride(0),
        stride_write=write_slots.stride(0),
        HAS_NOISE=has_noise,
        TOKENS=launches.token_block(tokens),
    )
    return out


@triton.jit(do_not_specialize=["noise", "rows"], do_not_specialize_on_alignment=ROW_INPUTS)
def selective_scan_kernel(
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
    noise,
    rows,
    channels,
    state_size,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_write,
    HAS_NOISE: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if start < end:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        column = tl.arange(0, COLUMNS)
        there, in_state = channel < channels, column < state_size
        inside = there[:, None] & in_state[None, :]
        slot_elements = tl.cast(channels, tl.int64) * state_size
        place = channel[:, None] * state_size + column[None, :]
        rates = -tl.exp(tl.load(A_log + place, mask=inside, other=0.0))
        skip = tl.load(D + channel, mask=there, other=0.0)
        bias = tl.load(dt_bias + channel, mask=there, other=0.0)
        read, write = tl.load(read_slots + row).to(tl.int64), tl.load(write_slots + row * stride_write).to(tl.int64)
        before = tl.load(start_positions + row) - start  # A token's position less its index in the step.
        is_read = inside & (spread(read, channel) > 0)[:, None]
        state = tl.load(states + read * slot_elements + place, mask=is_read, other=0.0).to(tl.float32)
        first, last = start * 0, start * 0
        if checkpoints is not None:
            first, last = tl.load(checkpoints + row), tl.load(checkpoints + row + 1)
        token = start
        for entry in range(first, last + 1):
            # Each pass runs up to the next checkpoint, the last one to the end.
            stop, slot = end, write
            if checkpoints is not None and entry < last:
                stop = start + tl.load(checkpoints + rows + 1 + 2 * entry)
                slot = tl.load(checkpoints + rows + 2 + 2 * entry).to(tl.int64)
            for number in range(token, stop):
                at = read * 0 + number  # This makes it int64.
                raw = tl.load(dt + at * stride_dt + channel, mask=there, other=0.0)
                step = step_size(raw, bias, 0.0, float("inf"))
                value = tl.load(x + at * stride_x + channel, mask=there, other=0.0).to(tl.float32)
                b = tl.load(B + at * stride_b + column, mask=in_state, other=0.0).to(tl.float32)
                c = tl.load(C + at * stride_c + column, mask=in_state, other=0.0).to(tl.float32)
                state = advanced(state, rates, step, value, b)
                y = tl.sum(state * c[None, :], axis=1) + skip * value
                tl.store(out + at * channels + channel, to_dtype(y, out.dtype.element_ty), mask=there)
                position = before + number
                kept = rounded_stochastically(
                    state, channel, column, position, noise, state_size, states.dtype.element_ty, HAS_NOISE
                )
                state = kept.to(tl.float32)
            tl.store(states + slot * slot_elements + place, to_dtype(state, states.dtype.element_ty), mask=inside)
            token = stop


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    noise: int | None = None,
    packable: bool = False,
) -> torch.Tensor:
    """Compute `ops.selective_scan`; its reference documents arguments and result."""
    assert not packable, common.NOT_PACKABLE
    row_starts = row_starts - row_starts[:1]  # Other rows may come first.
    channels, state_size = states.shape[1:]
    rows = read_slots.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (launch,) = launches.selective_scan_launches(
        channels=channels, state_size=state_size, capability=common.capability(x)
    )
    has_noise = noise is not None and states.dtype != torch.float32
    table, _ = checkpoint_table(checkpoints, 0, rows, x.device)
    common.run(
        selective_scan_kernel,
        (rows, cdiv(channels, launch.blocks["CHANNELS"])),
        launch,
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=states,
        row_starts=row_starts,
        start_positions=start_positions,
        read_slots=read_slots,
        write_slots=write_slots,
        checkpoints=table,
        out=out,
        noise=noise if has_noise else 0,
        rows=rows,
        channels=channels,
        state_size=state_size,
        stride_x=x.stride(0),
        stride_dt=dt.stride(0),
        stride_b=B.stride(0),
        stride_c=C.stride(0),
        stride_write=write_slots.stride(0),
        HAS_NOISE=has_noise,
    )
    return out
