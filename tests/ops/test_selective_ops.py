"""The references of Mamba-1's recurrence (selective_update, selective_scan) against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference import selective
from tests.support.examples import examples
from tests.support.native_kernels import rounding, same_bits
from tests.support.selective_cases import Rows, case_of, check_scan, check_update, scan, update

few = examples(25)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@few
@given(
    pasts=st.lists(st.sampled_from(["none", "own", "other"]), min_size=1, max_size=4),
    per_row=st.integers(1, 3),
    channels=st.sampled_from([1, 5, 20]),
    size=st.sampled_from([1, 4, 16]),
    dtype=dtypes,
    state_dtype=dtypes,
    padding=st.integers(0, 2),
    seed=seeds,
)
def test_each_row_goes_from_its_read_slot_to_its_write_slots(
    pasts: list[str],
    per_row: int,
    channels: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    kernel = selective.selective_update
    check_update(kernel, pasts, per_row, channels, size, dtype, state_dtype, padding, seed, keeps_null_slot=False)


@few
@given(
    spans=st.lists(st.tuples(st.sampled_from([0, 16, 40]), st.integers(0, 20)), min_size=1, max_size=4),
    channels=st.sampled_from([1, 5, 20]),
    size=st.sampled_from([1, 4, 16]),
    dtype=dtypes,
    seed=seeds,
)
def test_the_scan_equals_the_recurrence(
    spans: list[tuple[int, int]], channels: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    check_scan(selective.selective_scan, spans, channels, size, dtype, seed)


@pytest.mark.parametrize("noise", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_prompt_has_the_same_states_however_it_is_cut_and_decoded(dtype: torch.dtype, noise: int | None) -> None:
    """Also where they are rounded, stochastically too. But for a rounding: the end of a tensor, which fills no vector,
    may be computed in another way than what stands before it."""
    case = case_of(20, 6, 8)
    whole, parts = case.slots(4, dtype), case.slots(4, dtype)
    scan(selective.selective_scan, case, whole, Rows([0], [20]), [1], [(0, 9, 2)], noise)
    scan(selective.selective_scan, case.tokens(0, 9), parts, Rows([0], [9]), [1], (), noise)
    close = {"rtol": 2 * rounding(dtype), "atol": 1e-6}
    torch.testing.assert_close(parts[1], whole[2], **close)
    scan(selective.selective_scan, case.tokens(9, 17), parts, Rows([9], [8]), [1], (), noise)
    update(selective.selective_update, case.tokens(17, 20), parts, [1], [[2, 3, 1]], [17], noise)
    torch.testing.assert_close(parts[1], whole[1], **close)


def test_padding_cannot_reach_a_real_row() -> None:
    """Rows whose slots are null and whose inputs are NaN."""
    case = case_of(3, 4, 8)
    states, alone = case.slots(3), case.slots(3)
    expected = update(selective.selective_update, case.tokens(0, 1), alone, [1], [[2]])
    for tensor in (case.x, case.dt, case.B, case.C):
        tensor[1:] = torch.nan
    out = update(selective.selective_update, case, states, [1, 0, 0], [[2], [0], [0]])
    assert same_bits(out[:1], expected)
    assert same_bits(states[1:], alone[1:])
