"""delta_update: a program takes some value channels of one row's head through all tokens of the row.

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
from ostinato.ops.triton.state.rounding import step_size


@triton.jit
def unit(x, axis: tl.constexpr):
    """Divide each vector of `x` along `axis`, the last one, by its length, in float32."""
    x = x.to(tl.float32)
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, axis=axis) + 1e-6), axis)


@triton.jit
def log_decay(a, bias, A_log):
    """Return the logarithm of a decay, at most 0, in float32."""
    return -tl.exp(A_log) * step_size(a, bias, 0.0, float("inf"))


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
                state = state * tl.exp(log_decay(raw, bias, rate))[:, None]
            else:
                raw, bias = tl.load(a + token * stride_a + head * stride_a_head), tl.load(dt_bias + head)
                state = state * tl.exp(log_decay(raw, bias, rate))
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
    beta_scale: float,
    keys_take_turns: bool,
    states: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.delta_update`; its reference documents arguments and result."""
    assert states.dtype == torch.float32, f"states of a delta net in {states.dtype}; use float32"
    heads, key_dim, value_dim = states.shape[1:]
    rows, tokens = write_slots.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    (launch,) = launches.delta_update_launches(
        rows=rows, num_heads=heads, key_dim=key_dim, value_dim=value_dim, capability=launcher.capability(v)
    )
    launcher.run(
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
        PER_CHANNEL=a.dim() == 3,
        TOKENS=launches.token_block(tokens),
    )
    return out
