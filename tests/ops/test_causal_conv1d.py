"""The short convolution of a state layer against its definition, as loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference import conv
from tests.ops.test_state_ops import NAN, few, int32, normal, row_starts, same, seeds


def convolve(
    history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """silu(bias + sum_j weight[j] x[t - width + 1 + j]) at every t of `history` [time, channels], zeros before it;
    without an activation the sum."""
    time, channels = history.shape
    width = len(weight)
    out = torch.zeros(time, channels, dtype=torch.float64)
    for t in range(time):
        for c in range(channels):
            total = 0.0 if bias is None else float(bias[c])
            for j in range(width):
                if t - width + 1 + j >= 0:
                    total += float(weight[j, c]) * float(history[t - width + 1 + j, c])
            out[t, c] = total / (1 + math.exp(-total)) if activation else total
    return out


def conv_state(history: torch.Tensor, width: int) -> torch.Tensor:
    """The last `width - 1` inputs, zeros before the first: [width - 1, channels]."""
    return torch.cat((torch.zeros(width - 1, history.shape[1]), history))[len(history) :]


@few
@given(
    width=st.integers(2, 4),
    per_decode_row=st.integers(1, 3),
    decode_pasts=st.lists(st.integers(0, 5), max_size=3),
    prefills=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=3),
    has_bias=st.booleans(),
    activation=st.sampled_from(["silu", None]),
    slab=st.sampled_from([1, 3, 32]),
    seed=seeds,
)
def test_convolution_continues_each_row_from_its_read_slot(
    width: int,
    per_decode_row: int,
    decode_pasts: list[int],
    prefills: list[tuple[int, int]],
    has_bias: bool,
    activation: str | None,
    slab: int,
    seed: int,
) -> None:
    """Read slots differ from write slots, except for the last row; a row without a past reads slot 0, which is NaN.

    A prefill row leaves one state behind in the middle. All slots that nobody writes keep their bits.
    Rows longer than `slab` tokens are convolved in parts.
    """
    rows = [(past, per_decode_row) for past in decode_pasts] + prefills
    if not rows:
        return
    generator = torch.Generator().manual_seed(seed)
    channels = 3
    weight = normal(generator, width, channels)
    bias = normal(generator, channels) if has_bias else None
    histories = [normal(generator, past + new, channels) for past, new in rows]
    slots = iter((torch.randperm(6 * len(rows), generator=generator) + 1).tolist())
    states = torch.full((6 * len(rows) + 1, width - 1, channels), NAN)
    expected_states = states.clone()
    reads, writes, checkpoints = [], [], []
    for row, ((past, new), history) in enumerate(zip(rows, histories, strict=True)):
        read, own = (next(slots) if past else 0), [next(slots) for _ in range(per_decode_row)]
        if row == len(rows) - 1 and past:
            own[0] = read
        if past:
            states[read] = expected_states[read] = conv_state(history[:past], width)
        reads.append(read)
        writes.append(own)
        if row < len(decode_pasts):
            for i in range(per_decode_row):
                expected_states[own[i]] = conv_state(history[: past + i + 1], width)
        elif new:
            if new > 1:
                checkpoints.append((row, new // 2, next(slots)))
                expected_states[checkpoints[-1][2]] = conv_state(history[: past + new // 2], width)
            expected_states[own[0]] = conv_state(history, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "SLAB", slab)
        out = conv.causal_conv1d(
            torch.cat([history[past:] for (past, _), history in zip(rows, histories, strict=True)]),
            weight,
            bias,
            states,
            row_starts([new for _, new in rows]),
            int32(*reads),
            int32(*writes),
            len(decode_pasts),
            checkpoints,
            activation,
        )
    expected = [convolve(h, weight, bias, activation)[past:] for (past, _), h in zip(rows, histories, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected).float(), atol=1e-5, rtol=1e-5)
    assert same(states, expected_states)


@few
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), seeds)
def test_convolution_does_not_depend_on_where_a_prompt_is_cut(lengths: list[int], decode: bool, seed: int) -> None:
    """With `decode`, one-token parts are decode rows."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = normal(generator, sum(lengths), 4), normal(generator, 4, 4)
    states, parts, begin = torch.full((2, 3, 4), NAN), [], 0
    for length in lengths:
        arguments = (row_starts([length]), int32(1 if begin else 0), int32([1]), int(decode and length == 1))
        part = x[begin : begin + length]
        parts.append(conv.causal_conv1d(part, weight, None, states, *arguments))
        begin += length
    whole = conv.causal_conv1d(
        x, weight, None, torch.full((2, 3, 4), NAN), row_starts([begin]), int32(0), int32([1]), 0
    )
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)
