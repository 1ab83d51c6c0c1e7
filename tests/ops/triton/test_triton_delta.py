"""Triton's delta_update and delta_scan against their references: drafts, padding, ragged prompts, checkpoints, and NaN
wherever nothing may be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops import scratch
from ostinato.ops.dispatch import triton_kernel
from ostinato.ops.launch_tables.state import delta_scan_launches
from tests.support.delta_cases import delta_case, with_betas
from tests.support.native_kernels import int32
from tests.support.triton_kernels import DTYPES, TOLERANCE, assert_close, require_triton, run_both

require_triton()

from ostinato.ops.triton import common  # noqa: E402

dtypes = st.sampled_from(DTYPES)
sizes = st.sampled_from([3, 8, 16])
bounded = st.sampled_from([0.0, -5.0])
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
    decay_bound=bounded,
)
def test_delta_update(
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    key_dim: int,
    value_dim: int,
    per_channel: bool,
    beta_scale: float,
    decay_bound: float,
) -> None:
    """The first row begins with nothing, the others where they read or elsewhere."""
    shape = {"key_dim": key_dim, "value_dim": value_dim, "per_channel": per_channel, "beta_scale": beta_scale}
    shape["decay_bound"] = decay_bound
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


@settings(max_examples=14)
@given(
    dtype=dtypes,
    rows=st.lists(st.tuples(st.integers(0, 37), st.sampled_from([0, 3, 16, 29])), min_size=1, max_size=3),
    key_dim=sizes,
    value_dim=st.sampled_from([3, 16, 20]),
    per_channel=st.booleans(),
    beta_scale=st.sampled_from([1.0, 2.0]),
    decay_bound=bounded,
    betas=st.sampled_from(["least", "largest", "either", "any"]),
    strength=st.sampled_from([-6.0, 0.0, 4.0, 12.0]),
    in_place=st.booleans(),
)
@pytest.mark.slow
def test_delta_scan(
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    key_dim: int,
    value_dim: int,
    per_channel: bool,
    beta_scale: float,
    decay_bound: float,
    betas: str,
    strength: float,
    in_place: bool,
) -> None:
    """Rows with long and short memories, some empty, that begin with a state where tokens came before; states at all
    multiples of 16. What nobody reads is NaN: the null slot, and slots that are written first."""
    starts = [sum(length for length, _ in rows[:i]) for i in range(len(rows) + 1)]
    shape = {"key_dim": key_dim, "value_dim": value_dim, "per_channel": per_channel, "beta_scale": beta_scale}
    shape["decay_bound"] = decay_bound
    case = with_betas(delta_case(starts[-1], **shape, strength=strength, seed=starts[-1], dtype=dtype), betas)
    states = case.slots(24)
    states[4:] = torch.nan
    reads = [row + 1 if position else 0 for row, (_, position) in enumerate(rows)]
    writes = [row + (1 if in_place else 4) for row in range(len(rows))]
    marks = [
        (row, offset, 8 + 4 * row + i)
        for row, (length, position) in enumerate(rows)
        for i, offset in enumerate(range(16 - position % 16, length + 1, 16))
    ]
    positions = int32([position for _, position in rows])
    slots = (int32(starts), positions, int32(reads), int32(writes))
    y, right, left, expected = run_both("delta_scan", *case.args(), states, *slots, marks)
    assert not right.isnan().any()
    assert_close(y, right)
    assert_close(left[7], expected[7])


@pytest.mark.parametrize("per_channel", [False, True])
def test_tokens_outside_of_all_rows_reach_no_prompt(per_channel: bool) -> None:
    """Those behind the last row, which are NaN; with a checkpoint at a row's end. Other rows come first in the step."""
    case = delta_case(24, key_dim=8, value_dim=8, per_channel=per_channel)
    poisoned = {name: getattr(case, name).clone() for name in ("q", "k", "v", "a", "b")}
    for tensor in poisoned.values():
        tensor[19:] = torch.nan
    slots = (int32([3, 3, 22]), int32([0, 5]), int32([0, 1]), int32([2, 1]))
    given = replace(case, **poisoned).args()
    y, right, left, expected = run_both("delta_scan", *given, case.slots(4), *slots, [(1, 11, 3), (1, 19, 2)])
    assert not right[:19].isnan().any()
    assert_close(y[:19], right[:19])
    assert_close(left[7], expected[7])


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_scan_allocates_what_the_plan_counts(per_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"key_heads": 2, "heads_per_key": 3, "key_dim": 8, "value_dim": 24, "per_channel": per_channel}
    case = delta_case(50, **shape)
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(common, "run", lambda kernel, grid, launch, **arguments: started.append(arguments))
    triton_kernel("delta_scan")(*case.args(), case.slots(3), int32([0, 20, 50]), int32([0, 7]), *[int32([1, 2])] * 2)
    of_chunks, of_rows = started
    assert of_chunks["work"] is of_rows["work"]
    taken = sum(of_rows[name].numel() * of_rows[name].element_size() for name in ("work", "ends"))
    sizes = {"num_heads": 6, "key_dim": 8, "value_dim": 24, "per_channel": per_channel}
    assert taken == scratch.triton_delta_scan(tokens=50, rows=2, **sizes).shared


def test_no_launch_of_a_scan_is_one_that_is_known_to_write_elsewhere() -> None:
    for key_dim, value_dim in ((64, 64), (128, 128), (96, 192), (256, 256)):
        for element_bytes in (2, 4):
            sizes = {"key_dim": key_dim, "value_dim": value_dim, "element_bytes": element_bytes}
            assert {launch.num_stages for launch in delta_scan_launches(**sizes, capability=90)} == {1}


@pytest.mark.parametrize("name", ["delta_update", "delta_scan"])
def test_states_of_16_bits_are_refused(name: str) -> None:
    case, one = delta_case(1), int32([0])
    slots = (one, int32([[1]])) if name == "delta_update" else (int32([0, 1]), one, one, int32([1]))
    with pytest.raises(AssertionError, match="use float32"):
        run_both(name, *case.args(), case.slots(2).bfloat16(), *slots)
