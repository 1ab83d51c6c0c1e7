"""state_update: a program takes some channels of one row's head through all tokens of the row.

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
) -> torch.Tensor:
    """Compute `ops.state_update`; its reference documents arguments and result."""
    heads, head_dim, state_size = ssm_states.shape[1:]
    rows, tokens = write_slots.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_noise = noise is not None and ssm_states.dtype != torch.float32
    assert start_positions is not None or not has_noise, "noise is a function of positions"
    (launch,) = launches.state_update_launches(
        rows=rows, num_heads=heads, head_dim=head_dim, state_size=state_size, capability=launcher.capability(x)
    )
    launcher.run(
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
