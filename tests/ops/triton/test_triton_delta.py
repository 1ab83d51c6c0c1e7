"""Triton's delta_update and delta_scan against their references: ragged batches, drafts, empty rows, checkpoints, and
NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.delta_cases import delta_case, int32, with_betas
from tests.support.triton_kernels import DTYPES, TOLERANCE, assert_close, require_triton, run_both

require_triton()

dtypes = st.sampled_from(DTYPES)
sizes = st.sampled_from([3, 8, 16])
SCAN_TOLERANCE = 1e-4
"""Of float32: the changes of a chunk come out of a triangular system."""


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
    assert_close(y, right, max(TOLERANCE[dtype], SCAN_TOLERANCE))
    assert_close(left[7], expected[7], SCAN_TOLERANCE)


def test_an_update_of_padding_rows_gives_zeros_and_leaves_other_slots_alone() -> None:
    case = delta_case(4, key_dim=8, value_dim=8)
    reads, writes = int32([1, 0]), int32([[1, 9], [0, 0]])
    y, right, left, expected = run_both("delta_update", *case.args(), case.slots(10), reads, writes)
    assert y[2:].abs().max() == 0
    assert_close(y[:2], right[:2], SCAN_TOLERANCE)
    assert_close(left[7][1:], expected[7][1:], SCAN_TOLERANCE)


@settings(max_examples=10)
@given(
    dtype=dtypes,
    rows=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 3, 16, 29])), min_size=1, max_size=2),
    key_heads=st.integers(1, 2),
    key_dim=sizes,
    value_dim=sizes,
    per_channel=st.booleans(),
    betas=st.sampled_from(["least", "largest", "either", "any"]),
    strength=st.sampled_from([-6.0, 0.0, 6.0]),
)
def test_delta_scan(
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    key_heads: int,
    key_dim: int,
    value_dim: int,
    per_channel: bool,
    betas: str,
    strength: float,
) -> None:
    starts = [sum(length for length, _ in rows[:i]) for i in range(len(rows) + 1)]
    shape = {"key_heads": key_heads, "heads_per_key": 1, "key_dim": key_dim, "value_dim": value_dim}
    options = {"per_channel": per_channel, "beta_scale": 2.0, "strength": strength}
    case = with_betas(delta_case(starts[-1], **shape, **options, seed=starts[-1], dtype=dtype), betas)
    reads = [row + 1 if position else 0 for row, (_, position) in enumerate(rows)]
    writes = [row + 3 for row in range(len(rows))]
    marks = [
        (row, offset, 5 + row * 4 + i)
        for row, (length, position) in enumerate(rows)
        for i, offset in enumerate(range(16 - position % 16, length + 1, 16))
    ]
    step = (int32(starts), int32([position for _, position in rows]), int32(reads), int32(writes), marks)
    y, right, left, expected = run_both("delta_scan", *case.args(), case.slots(14), *step)
    assert_close(y, right, max(TOLERANCE[dtype], SCAN_TOLERANCE))
    assert_close(left[7], expected[7], SCAN_TOLERANCE)


@pytest.mark.parametrize("name", ["delta_update", "delta_scan"])
def test_states_of_16_bits_are_refused(name: str) -> None:
    case = delta_case(1)
    rows = (int32([0]), int32([[1]])) if name == "delta_update" else (int32([0, 1]), *[int32([0])] * 3)
    with pytest.raises(AssertionError, match="use float32"):
        run_both(name, *case.args(), case.slots(2).bfloat16(), *rows)
