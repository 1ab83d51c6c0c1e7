"""Triton's selective_update and selective_scan against their references: drafts, ragged rows, checkpoints, states in 16
bits, and NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.native_kernels import int32
from tests.support.scan_cases import Rows
from tests.support.selective_cases import case_of
from tests.support.triton_kernels import DTYPES, assert_close, check, require_triton, run_both

require_triton()

dtypes = st.sampled_from(DTYPES)


@settings(max_examples=10)
@given(
    dtype=dtypes,
    kept=dtypes,
    rows=st.integers(1, 3),
    tokens=st.integers(1, 3),
    channels=st.sampled_from([5, 40]),
    size=st.sampled_from([8, 12]),
    noise=st.sampled_from([None, 0, 5]),
)
def test_selective_update(
    dtype: torch.dtype, kept: torch.dtype, rows: int, tokens: int, channels: int, size: int, noise: int | None
) -> None:
    """The first row begins with nothing, the others where they read or elsewhere."""
    case = case_of(rows * tokens, channels, size, rows * 8 + tokens, dtype)
    reads = torch.arange(rows, dtype=torch.int32)
    writes = torch.arange(1, rows * tokens + 1, dtype=torch.int32).view(rows, tokens) + (8 if tokens > 1 else -1)
    writes[0, 0] = 20
    check("selective_update", *case.inputs, case.slots(24, kept), reads, writes, reads * 7, noise)


def test_padding_rows_give_zeros_and_leave_other_slots_alone() -> None:
    case = case_of(4, 20, 8)
    slots = (int32([1, 0]), int32([[1, 9], [0, 0]]))
    y, right, given, expected = run_both("selective_update", *case.inputs, case.slots(10), *slots)
    assert y[2:].abs().max() == 0
    assert_close(y[:2], right[:2])
    assert_close(given[-3][1:], expected[-3][1:])


@settings(max_examples=10)
@given(
    dtype=dtypes,
    kept=dtypes,
    spans=st.lists(st.tuples(st.sampled_from([0, 3, 16]), st.integers(0, 21)), min_size=1, max_size=3),
    channels=st.sampled_from([5, 40]),
    noise=st.sampled_from([None, 3]),
)
@pytest.mark.slow
def test_selective_scan(
    dtype: torch.dtype, kept: torch.dtype, spans: list[tuple[int, int]], channels: int, noise: int | None
) -> None:
    """Checkpoints at every fifth token and at the end."""
    rows = Rows([position for position, _ in spans], [length for _, length in spans])
    case = case_of(rows.starts[-1], channels, 12, rows.starts[-1], dtype)
    places = [(row, at) for row, length in enumerate(rows.lengths) for at in {*range(5, length, 5), length} - {0}]
    marks = [(row, offset, 8 + i) for i, (row, offset) in enumerate(places)]
    slots = (int32(rows.starts), int32(rows.positions), int32(rows.reads), int32(range(4, 4 + len(spans))))
    memory = case.slots(8 + len(marks) + 1, kept)
    check("selective_scan", *case.inputs, memory, *slots, marks, noise=noise)


@pytest.mark.parametrize("length", [0, 1])
def test_a_prompt_without_tokens_leaves_all_slots_as_they_are(length: int) -> None:
    case = case_of(length, 20, 8)
    slots = (int32([0, 0, length]), int32([0, 3]), int32([0, 1]), int32([2, 3]))
    check("selective_scan", *case.inputs, case.slots(4), *slots)
