"""selective_update: a program takes some channels of one row through all tokens of the row.

Its part of the state stays in registers from the read slot on, so it is read once and written once per token. A row
whose slots are all null is padding and costs no memory traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.launches import state as launches
from ostinato.ops.launches.table import cdiv
from ostinato.ops.triton import launcher
from ostinato.ops.triton.launcher import spread, to_dtype
from ostinato.ops.triton.state.rounding import rounded_stochastically, step_size


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
            kept = rounded_stochastically(state, channel, column, position, noise, state_size, states.dtype.element_ty, HAS_NOISE)
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
) -> torch.Tensor:
    """Compute `ops.selective_update`; its reference documents arguments and result."""
    channels, state_size = states.shape[1:]
    rows, tokens = write_slots.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_noise = noise is not None and states.dtype != torch.float32
    assert start_positions is not None or not has_noise, "noise is a function of positions"
    (launch,) = launches.selective_update_launches(
        rows=rows, channels=channels, state_size=state_size, capability=launcher.capability(x)
    )
    launcher.run(
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
