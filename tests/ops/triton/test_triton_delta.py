"""Triton's delta_update against its reference: drafts, padding, and NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.delta_cases import delta_case
from tests.support.native_kernels import int32
from tests.support.triton_kernels import DTYPES, TOLERANCE, assert_close, require_triton, run_both

require_triton()

dtypes = st.sampled_from(DTYPES)
sizes = st.sampled_from([3, 8, 16])
STATE_TOLERANCE = 1e-4
"""Of float32: what is added is a difference of sums."""


@settings(max_examples=8)
@given(
    dtype=dtypes,
    rows=st.integers(1, 3),
    tokens=st.integers(1, 3),
    key_dim=sizes,
    value_dim=sizes,
    per_channel=st.booleans(),
    beta_scale=st.sampled_from([1.0, 2.0]),
)
def test_delta_update(
    dtype: torch.dtype, rows: int, tokens: int, key_dim: int, value_dim: int, per_channel: bool, beta_scale: float
) -> None:
    """The first row begins with nothing, the others where they read or elsewhere."""
    shape = {"key_dim": key_dim, "value_dim": value_dim, "per_channel": per_channel, "beta_scale": beta_scale}
    case = delta_case(rows * tokens, **shape, seed=rows * 8 + tokens, dtype=dtype)
    reads = torch.arange(rows, dtype=torch.int32)
    writes = torch.arange(1, rows * tokens + 1, dtype=torch.int32).view(rows, tokens) + (8 if tokens > 1 else -1)
    writes[0, 0] = 20
    y, right, left, expected = run_both("delta_update", *case.args(), case.slots(21), reads, writes)
    assert_close(y, right, max(TOLERANCE[dtype], STATE_TOLERANCE))
    assert_close(left[7], expected[7], STATE_TOLERANCE)


def test_an_update_of_padding_rows_gives_zeros_and_leaves_other_slots_alone() -> None:
    case = delta_case(4, key_dim=8, value_dim=8)
    reads, writes = int32([1, 0]), int32([[1, 9], [0, 0]])
    y, right, left, expected = run_both("delta_update", *case.args(), case.slots(10), reads, writes)
    assert y[2:].abs().max() == 0
    assert_close(y[:2], right[:2], STATE_TOLERANCE)
    assert_close(left[7][1:], expected[7][1:], STATE_TOLERANCE)


def test_states_of_16_bits_are_refused() -> None:
    case = delta_case(1)
    with pytest.raises(AssertionError, match="use float32"):
        run_both("delta_update", *case.args(), case.slots(2).bfloat16(), int32([0]), int32([[1]]))
