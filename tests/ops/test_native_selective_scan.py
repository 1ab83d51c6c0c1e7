"""The native selective_scan against the recurrence in float64, and against decoding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, int32, same_bits
from tests.support.native_sets import SETS, native_kernel, record
from tests.support.scan_cases import Rows
from tests.support.selective_cases import case_of, check_scan, scan, update

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@few
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), min_size=1, max_size=4),
    channels=st.sampled_from([1, 7, 16, 64, 65, 150]),
    size=st.sampled_from([1, 4, 16, 19, 32, 64]),
    dtype=dtypes,
    seed=seeds,
)
def test_the_scan_equals_the_recurrence(
    isa: str, spans: list[tuple[int, int]], channels: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    check_scan(checked_kernel(isa, "selective_scan"), spans, channels, size, dtype, seed)


@few
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33]), min_size=1, max_size=4),
    channels=st.sampled_from([3, 16, 70, 128]),
    size=st.sampled_from([4, 16, 19]),
    dtype=dtypes,
    state_dtype=dtypes,
    has_past=st.booleans(),
    noise=st.sampled_from([None, 0, 7]),
    seed=seeds,
)
def test_a_prompt_has_the_bits_of_decoding_token_by_token_wherever_it_is_cut(
    isa: str,
    lengths: list[int],
    channels: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    has_past: bool,
    noise: int | None,
    seed: int,
) -> None:
    """`lengths` are the parts of a prompt. Each leaves checkpoints inside and at its end."""
    total, first = sum(lengths), 5 if has_past else 0
    case = case_of(total, channels, size, seed, dtype)
    decoded, states = case.slots(2 + total, state_dtype), case.slots(4, state_dtype)
    decoded[1] = states[1]
    decode, scan_of = native_kernel(isa, "selective_update"), checked_kernel(isa, "selective_scan")
    expected = [
        update(
            decode,
            *(case.tokens(token, token + 1), decoded, [token + 1 if token or has_past else 0], [[token + 2]]),
            *([first + token], noise),
        )
        for token in range(total)
    ]
    at = 0
    for length in lengths:
        before = states.clone()
        checkpoints = [(0, length // 2, 2)] * (length > 1) + [(0, length, 3)] * (length > 0)
        part = scan(
            scan_of, case.tokens(at, at + length), states, Rows([first + at], [length]), [1], checkpoints, noise
        )
        if length == 0:
            assert same_bits(states, before)
            continue
        assert same_bits(part, torch.cat(expected[at : at + length]))
        assert same_bits(states[1], decoded[at + length + 1])
        assert same_bits(states[3], decoded[at + length + 1])
        if length > 1:
            assert same_bits(states[2], decoded[at + length // 2 + 1])
        at += length


def test_a_row_has_the_same_bits_in_any_batch(isa: str) -> None:
    rows = Rows([0, 256, 0, 112], [40, 0, 37, 20])
    case = case_of(rows.starts[-1], 300, 16, dtype=torch.bfloat16)
    together = case.slots(9)
    before = together.clone()
    out = scan(checked_kernel(isa, "selective_scan"), case, together, rows, [row + 5 for row in range(4)])
    for row in (0, 2, 3):
        alone = before[[0, row + 1]]
        begin, end = rows.starts[row], rows.starts[row + 1]
        one = Rows([rows.positions[row]], [rows.lengths[row]])
        given = scan(native_kernel(isa, "selective_scan"), case.tokens(begin, end), alone, one, [1])
        assert same_bits(given, out[begin:end])
        assert same_bits(alone[1], together[row + 5])
    assert same_bits(together[6], before[6])


def test_a_replay_with_fewer_tokens_leaves_the_rows_behind_them_alone(isa: str) -> None:
    case = case_of(40, 70, 16)
    states, expected = case.slots(3), case.slots(3)
    rows = (int32([0, 25, 40]), int32([0, 0]), int32([0, 0]), int32([1, 2]), [(1, 10, 2)])
    out = torch.full(case.x.shape, torch.nan)
    record(isa, native_kernel(isa, "selective_scan"), out, *case.inputs, states, *rows).run(25)
    y = scan(native_kernel(isa, "selective_scan"), case.tokens(0, 25), expected, Rows([0], [25]), [1])
    assert same_bits(out[:25], y)
    assert out[25:].isnan().all()
    assert same_bits(states, expected)
