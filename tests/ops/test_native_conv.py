"""The native causal_conv1d and token_shift against their definitions, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, int32, rounding, same_bits, spaced
from tests.support.native_sets import SETS

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
steps = {
    "per_row": st.integers(1, 4),
    "decode_pasts": st.lists(st.integers(0, 5), max_size=3),
    "prefills": st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=3),
}


@dataclass
class Step:
    """Rows of a step: what each one's inputs were and are, and slots in which the last `kept` of the past lie."""

    histories: list[torch.Tensor]
    pasts: list[int]
    x: torch.Tensor
    states: torch.Tensor
    expected_states: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, list[tuple[int, int, int]]]


def make_step(
    per_row: int,
    decode_pasts: list[int],
    prefills: list[tuple[int, int]],
    kept: int,
    channels: int,
    dtype: torch.dtype,
    seed: int,
) -> Step:
    """Odd rows write in place; rows without a past read slot 0, which is NaN. The last token of the first decode row
    is padding where rows have several. Prefill rows leave states behind after 1, after 2 and after half of their
    tokens. Slots that nobody writes are to keep what they hold."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(past, per_row) for past in decode_pasts] + prefills
    histories = [torch.randn(past + new, channels, generator=generator).to(dtype) for past, new in rows]
    slots = iter((torch.randperm(10 * len(rows) + 1, generator=generator) + 1).tolist())
    states = torch.randn(10 * len(rows) + 2, kept, channels, generator=generator).to(dtype)
    states[0] = torch.nan
    expected = states.clone()
    reads, writes, checkpoints = [], [], []

    def after(row: int, count: int) -> torch.Tensor:
        return torch.cat((torch.zeros(kept, channels, dtype=dtype), histories[row][:count]))[count:]

    for row, (past, new) in enumerate(rows):
        reads.append(next(slots) if past else 0)
        own = [next(slots) for _ in range(per_row)]
        if past:
            states[reads[-1]] = expected[reads[-1]] = after(row, past)
            own[0] = reads[-1] if row % 2 else own[0]
        if row < len(decode_pasts):
            own[-1] = 0 if row == 0 and per_row > 1 else own[-1]
            for i, slot in enumerate(own):
                if slot:
                    expected[slot] = after(row, past + i + 1)
        elif new:
            expected[own[0]] = after(row, past + new)
            for offset in sorted({1, 2, new // 2} & set(range(1, new + 1))):
                checkpoints.append((row, offset, next(slots)))
                expected[checkpoints[-1][2]] = after(row, past + offset)
        writes.append(own)
    starts = [0]
    for _, new in rows:
        starts.append(starts[-1] + new)
    x = torch.cat([history[past:] for (past, _), history in zip(rows, histories, strict=True)])
    in_tensors = (int32(starts), int32(reads), int32(writes))
    return Step(
        histories,
        [past for past, _ in rows],
        spaced(x, 3),
        states,
        expected,
        (*in_tensors, len(decode_pasts), checkpoints),
    )


def convolve(
    history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """silu(bias + sum_j weight[j] x[t - width + 1 + j]) in float64 at every t, zeros before the first; without an
    activation the sum."""
    width = len(weight)
    padded = torch.cat((torch.zeros(width - 1, history.shape[1], dtype=torch.float64), history.double()))
    total = torch.zeros(history.shape, dtype=torch.float64) if bias is None else bias.double().expand(history.shape)
    for j in range(width):
        total = total + weight[j].double() * padded[j : j + len(history)]
    return total / (1 + torch.exp(-total)) if activation else total


@few
@given(
    **steps,
    width=st.integers(2, 5),
    channels=st.sampled_from([1, 3, 16, 37, 64, 150]),
    has_bias=st.booleans(),
    activation=st.sampled_from(["silu", None]),
    dtype=dtypes,
    seed=seeds,
)
def test_convolution_continues_each_row_from_its_read_slot(
    isa: str,
    per_row: int,
    decode_pasts: list[int],
    prefills: list[tuple[int, int]],
    width: int,
    channels: int,
    has_bias: bool,
    activation: str | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if not decode_pasts and not prefills:
        return
    step = make_step(per_row, decode_pasts, prefills, width - 1, channels, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, channels, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if has_bias else None
    out = checked_kernel(isa, "causal_conv1d")(step.x, weight, bias, step.states, *step.rows, activation)
    expected = [
        convolve(h, weight, bias, activation)[past:] for past, h in zip(step.pasts, step.histories, strict=True)
    ]
    # In a sum near zero the error of its terms counts, and that of silu is at most the sum's.
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=rounding(dtype))
    assert same_bits(step.states, step.expected_states)


@few
@given(**steps, channels=st.sampled_from([1, 3, 64, 150]), dtype=dtypes, seed=seeds)
def test_shift_gives_each_token_its_predecessor(
    isa: str,
    per_row: int,
    decode_pasts: list[int],
    prefills: list[tuple[int, int]],
    channels: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if not decode_pasts and not prefills:
        return
    step = make_step(per_row, decode_pasts, prefills, 1, channels, dtype, seed)
    out = checked_kernel(isa, "token_shift")(step.x, step.states, *step.rows)
    zero = torch.zeros(1, channels, dtype=dtype)
    shifted = [torch.cat((zero, h))[past:-1] for past, h in zip(step.pasts, step.histories, strict=True)]
    assert same_bits(out, torch.cat(shifted))
    assert same_bits(step.states, step.expected_states)


@few
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(2, 5), dtypes, seeds)
def test_a_token_has_the_same_bits_wherever_its_prompt_is_cut(
    isa: str, lengths: list[int], width: int, dtype: torch.dtype, seed: int
) -> None:
    """As prefill and, where a part has one token, as decode; with another row in the batch, or alone."""
    generator = torch.Generator().manual_seed(seed)
    total, channels, conv = sum(lengths), 37, checked_kernel(isa, "causal_conv1d")
    x = torch.randn(total, channels, generator=generator).to(dtype)
    weight = torch.randn(width, channels, generator=generator).to(dtype)
    states = torch.full((3, width - 1, channels), torch.nan, dtype=dtype)
    both = torch.cat((x.flip(0), x))
    rows = (int32([0, total, 2 * total]), int32([0, 0]), int32([[1], [2]]))
    whole = conv(both, weight, None, states, *rows, 0)[total:]
    state, parts, begin = torch.full_like(states, torch.nan), [], 0
    for length in lengths:
        rows = (int32([0, length]), int32([1 if begin else 0]), int32([[1]]))
        parts.append(conv(x[begin : begin + length], weight, None, state, *rows, int(length == 1)))
        begin += length
    assert same_bits(torch.cat(parts), whole)
    assert same_bits(state[1], states[2])


@pytest.mark.parametrize("name", ["causal_conv1d", "token_shift"])
def test_padding_cannot_reach_a_real_row(isa: str, name: str) -> None:
    """A padding token behind a row's real one, and a padding row; their inputs are NaN."""
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(4, 20, generator=generator), None) if name == "causal_conv1d" else ()
    kept = 3 if name == "causal_conv1d" else 1
    clean, poison = torch.randn(6, 20, generator=generator), torch.full((6, 20), torch.nan)
    poison[:3] = clean[:3]
    rows = (int32([0, 2, 4, 6]), int32([1, 2, 0]), int32([[1, 3], [2, 0], [0, 0]]), 3)
    results = []
    for x in (clean, poison):
        states = torch.randn(5, kept, 20, generator=torch.Generator().manual_seed(2))
        results.append((checked_kernel(isa, name)(x, *weights, states, *rows), states))
    (expected, expected_states), (given, given_states) = results
    assert same_bits(given[:3], expected[:3])
    assert same_bits(given_states, expected_states)
