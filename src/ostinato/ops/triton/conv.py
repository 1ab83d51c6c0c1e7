"""`causal_conv1d` and `token_shift` on a GPU: a program takes a block of channels through some tokens of a row.

The last inputs are in registers. Decode rows are read and written by one program each. Prompts are split into segments,
whose outputs need no order; a second kernel writes the states after them, since a row may write the slot that it reads.
`token_shift` has the same kernels, with a token's predecessor as the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ostinato.ops.launch_tables import state as launches
from ostinato.ops.launch_tables.launch import cdiv
from ostinato.ops.triton import common
from ostinato.ops.triton.common import ROW_INPUTS, checkpoint_table, segment_of, spread, to_dtype


@triton.jit
def kept_input(states, slot, BACK: tl.constexpr, KEPT: tl.constexpr, channel, inside, channels):
    """Load the input `BACK` tokens before the state's position; zeros for slot 0 and beyond the `KEPT` inputs."""
    if BACK <= KEPT:
        place = (slot.to(tl.int64) * KEPT + KEPT - BACK) * channels + channel
        found = tl.load(states + place, mask=inside & (spread(slot, channel) > 0), other=0.0)
    else:
        found = tl.zeros(channel.shape, states.dtype.element_ty)
    return found


@triton.jit
def tap(weight, BACK: tl.constexpr, WIDTH: tl.constexpr, channel, inside, channels):
    """Load the weight of the input `BACK` tokens before a token, in float32; zeros for a shift."""
    if weight is None or BACK >= WIDTH:
        found = tl.zeros(channel.shape, tl.float32)
    else:
        place = weight + (WIDTH - 1 - BACK) * channels + channel
        found = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def output_of(
    now,
    p1,
    p2,
    p3,
    p4,
    p5,
    p6,
    w0,
    w1,
    w2,
    w3,
    w4,
    w5,
    w6,
    start,
    WIDTH: tl.constexpr,
    SHIFTS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Compute a token's output from its input and the six before it, the newest first, and their weights.

    `start` is the bias. A shift returns the previous input unchanged.
    """
    if SHIFTS:
        y = p1
    else:
        y = start
        if WIDTH > 6:
            y += p6.to(tl.float32) * w6
        if WIDTH > 5:
            y += p5.to(tl.float32) * w5
        if WIDTH > 4:
            y += p4.to(tl.float32) * w4
        if WIDTH > 3:
            y += p3.to(tl.float32) * w3
        if WIDTH > 2:
            y += p2.to(tl.float32) * w2
        y += p1.to(tl.float32) * w1
        y += now.to(tl.float32) * w0
        if SILU:
            y = y * (1.0 / (1.0 + tl.exp(-y)))
    return y


@triton.jit
def put_state(states, slot, p1, p2, p3, p4, p5, p6, channel, inside, channels, WIDTH: tl.constexpr):
    """Store the state with these last inputs, the newest first."""
    to = states + slot.to(tl.int64) * (WIDTH - 1) * channels + channel
    tl.store(to + (WIDTH - 2) * channels, p1, mask=inside)
    if WIDTH > 2:
        tl.store(to + (WIDTH - 3) * channels, p2, mask=inside)
    if WIDTH > 3:
        tl.store(to + (WIDTH - 4) * channels, p3, mask=inside)
    if WIDTH > 4:
        tl.store(to + (WIDTH - 5) * channels, p4, mask=inside)
    if WIDTH > 5:
        tl.store(to + (WIDTH - 6) * channels, p5, mask=inside)
    if WIDTH > 6:
        tl.store(to + (WIDTH - 7) * channels, p6, mask=inside)


@triton.jit
def conv_decode_kernel(
    x,
    weight,
    bias,
    states,
    read_slots,
    write_slots,
    out,
    channels,
    stride_x,
    stride_write,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFTS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    read = tl.load(read_slots + row)
    p1 = kept_input(states, read, 1, WIDTH - 1, channel, inside, channels)
    p2 = kept_input(states, read, 2, WIDTH - 1, channel, inside, channels)
    p3 = kept_input(states, read, 3, WIDTH - 1, channel, inside, channels)
    p4 = kept_input(states, read, 4, WIDTH - 1, channel, inside, channels)
    p5 = kept_input(states, read, 5, WIDTH - 1, channel, inside, channels)
    p6 = kept_input(states, read, 6, WIDTH - 1, channel, inside, channels)
    w0 = tap(weight, 0, WIDTH, channel, inside, channels)
    w1 = tap(weight, 1, WIDTH, channel, inside, channels)
    w2 = tap(weight, 2, WIDTH, channel, inside, channels)
    w3 = tap(weight, 3, WIDTH, channel, inside, channels)
    w4 = tap(weight, 4, WIDTH, channel, inside, channels)
    w5 = tap(weight, 5, WIDTH, channel, inside, channels)
    w6 = tap(weight, 6, WIDTH, channel, inside, channels)
    first = tap(bias, 0, 1, channel, inside, channels)
    for t in tl.static_range(TOKENS):
        token = row.to(tl.int64) * TOKENS + t
        now = tl.load(x + token * stride_x + channel, mask=inside, other=0.0)
        y = output_of(now, p1, p2, p3, p4, p5, p6, w0, w1, w2, w3, w4, w5, w6, first, WIDTH, SHIFTS, SILU)
        tl.store(out + token * channels + channel, to_dtype(y, out.dtype.element_ty), mask=inside)
        p6 = p5
        p5 = p4
        p4 = p3
        p3 = p2
        p2 = p1
        p1 = now
        write = tl.load(write_slots + row * stride_write + t)
        put_state(states, write, p1, p2, p3, p4, p5, p6, channel, inside, channels, WIDTH)


@triton.jit
def input_before(x, states, slot, at, start, kept, stride_x, channel, inside, channels):
    """Load the input at token `at` of the step, or from the row's state if that is before its `start`."""
    back = spread(start - at, channel)
    given = tl.load(x + at.to(tl.int64) * stride_x + channel, mask=inside & (back <= 0), other=0.0)
    place = (slot.to(tl.int64) * kept + kept - back) * channels + channel
    is_kept = inside & (spread(slot, channel) > 0) & (back > 0) & (back <= kept)
    return tl.where(back <= 0, given, tl.load(states + place, mask=is_kept, other=0.0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ROW_INPUTS)
def conv_prefill_kernel(
    x,
    weight,
    bias,
    states,
    row_starts,
    read_slots,
    out,
    rows,
    channels,
    stride_x,
    WIDTH: tl.constexpr,
    SHIFTS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row, token = segment_of(tl.program_id(0), row_starts, rows, TOKENS, SPAN)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if token < end:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        read, kept = tl.load(read_slots + row), WIDTH - 1
        p1 = input_before(x, states, read, token - 1, start, kept, stride_x, channel, inside, channels)
        p2 = input_before(x, states, read, token - 2, start, kept, stride_x, channel, inside, channels)
        p3 = input_before(x, states, read, token - 3, start, kept, stride_x, channel, inside, channels)
        p4 = input_before(x, states, read, token - 4, start, kept, stride_x, channel, inside, channels)
        p5 = input_before(x, states, read, token - 5, start, kept, stride_x, channel, inside, channels)
        p6 = input_before(x, states, read, token - 6, start, kept, stride_x, channel, inside, channels)
        w0 = tap(weight, 0, WIDTH, channel, inside, channels)
        w1 = tap(weight, 1, WIDTH, channel, inside, channels)
        w2 = tap(weight, 2, WIDTH, channel, inside, channels)
        w3 = tap(weight, 3, WIDTH, channel, inside, channels)
        w4 = tap(weight, 4, WIDTH, channel, inside, channels)
        w5 = tap(weight, 5, WIDTH, channel, inside, channels)
        w6 = tap(weight, 6, WIDTH, channel, inside, channels)
        first = tap(bias, 0, 1, channel, inside, channels)
        for t in range(TOKENS):
            at = (token + t).to(tl.int64)
            there = inside & (spread(token + t, channel) < end)
            now = tl.load(x + at * stride_x + channel, mask=there, other=0.0)
            y = output_of(now, p1, p2, p3, p4, p5, p6, w0, w1, w2, w3, w4, w5, w6, first, WIDTH, SHIFTS, SILU)
            tl.store(out + at * channels + channel, to_dtype(y, out.dtype.element_ty), mask=there)
            p6 = p5
            p5 = p4
            p4 = p3
            p3 = p2
            p2 = p1
            p1 = now


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=ROW_INPUTS)
def conv_states_kernel(
    x,
    states,
    row_starts,
    read_slots,
    write_slots,
    checkpoints,
    rows,
    channels,
    stride_x,
    stride_write,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the states after each prompt's last token and at its checkpoints.

    The same threads read all they need of the row's slot before they write anything.
    """
    row = tl.program_id(0)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    if start < end:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        read, kept = tl.load(read_slots + row), WIDTH - 1
        p1 = input_before(x, states, read, end - 1, start, kept, stride_x, channel, inside, channels)
        p2 = input_before(x, states, read, end - 2, start, kept, stride_x, channel, inside, channels)
        p3 = input_before(x, states, read, end - 3, start, kept, stride_x, channel, inside, channels)
        p4 = input_before(x, states, read, end - 4, start, kept, stride_x, channel, inside, channels)
        p5 = input_before(x, states, read, end - 5, start, kept, stride_x, channel, inside, channels)
        p6 = input_before(x, states, read, end - 6, start, kept, stride_x, channel, inside, channels)
        if checkpoints is not None:
            first, last = tl.load(checkpoints + row), tl.load(checkpoints + row + 1)
            for i in range(first, last):
                entry = checkpoints + rows + 1 + 2 * i
                at, to = start + tl.load(entry), tl.load(entry + 1)
                q1 = input_before(x, states, read, at - 1, start, kept, stride_x, channel, inside, channels)
                q2 = input_before(x, states, read, at - 2, start, kept, stride_x, channel, inside, channels)
                q3 = input_before(x, states, read, at - 3, start, kept, stride_x, channel, inside, channels)
                q4 = input_before(x, states, read, at - 4, start, kept, stride_x, channel, inside, channels)
                q5 = input_before(x, states, read, at - 5, start, kept, stride_x, channel, inside, channels)
                q6 = input_before(x, states, read, at - 6, start, kept, stride_x, channel, inside, channels)
                put_state(states, to, q1, q2, q3, q4, q5, q6, channel, inside, channels, WIDTH)
        write = tl.load(write_slots + row * stride_write)
        put_state(states, write, p1, p2, p3, p4, p5, p6, channel, inside, channels, WIDTH)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
    activation: str | None = "silu",
) -> torch.Tensor:
    """Compute `ops.causal_conv1d`; its reference documents arguments and result."""
    rows = (row_starts, read_slots, write_slots, num_decode_rows)
    return convolve(x, weight, bias, conv_states, *rows, checkpoints, activation)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]],
    activation: str | None = None,
) -> torch.Tensor:
    """Compute `causal_conv1d`, or without a weight the shift by one token."""
    channels = x.shape[1]
    width = states.shape[1] + 1
    assert 2 <= width <= launches.MAX_TAPS, f"a convolution of {width} taps"
    assert states.dtype == x.dtype, "states keep inputs as they are"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    decode, prefill, of_states = launches.causal_conv1d_launches(channels=channels, capability=common.capability(x))
    blocks = cdiv(channels, decode.blocks["CHANNELS"])
    taps = {"weight": weight, "bias": bias, "WIDTH": width, "SHIFTS": weight is None, "SILU": activation == "silu"}
    shared = {"x": x, "states": states, "channels": channels, "stride_x": x.stride(0)}
    tokens = write_slots.shape[1]
    common.run(
        conv_decode_kernel,
        (num_decode_rows, blocks),
        decode,
        **shared,
        **taps,
        read_slots=read_slots,
        write_slots=write_slots,
        out=out,
        TOKENS=tokens,
        stride_write=write_slots.stride(0),
    )
    rows = read_slots.shape[0] - num_decode_rows
    if rows == 0:
        return out
    starts, reads, writes = row_starts[num_decode_rows:], read_slots[num_decode_rows:], write_slots[num_decode_rows:]
    segments = (len(x) - num_decode_rows * tokens) // prefill.blocks["TOKENS"] + rows
    common.run(
        conv_prefill_kernel,
        (segments, blocks),
        prefill,
        **shared,
        **taps,
        row_starts=starts,
        read_slots=reads,
        out=out,
        rows=rows,
    )
    table, _ = checkpoint_table(checkpoints, num_decode_rows, rows, x.device)
    common.run(
        conv_states_kernel,
        (rows, blocks),
        of_states,
        **shared,
        row_starts=starts,
        read_slots=reads,
        write_slots=writes,
        checkpoints=table,
        rows=rows,
        stride_write=writes.stride(0),
        WIDTH=width,
    )
    return out


def token_shift(
    x: torch.Tensor,
    states: torch.Tensor,
    row_starts: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    num_decode_rows: int,
    checkpoints: Sequence[tuple[int, int, int]] = (),
) -> torch.Tensor:
    """Compute `ops.token_shift`; its reference documents arguments and result."""
    return convolve(x, None, None, states, row_starts, read_slots, write_slots, num_decode_rows, checkpoints)
