"""The scan of bfloat16 inputs on matrix units, or on what stands in for them, against the recurrence in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.native_sets import TILED_SETS, threads
from tests.support.scan_cases import NAN, NO_LIMIT, ROUNDING, Case, Rows, assert_near, normal, run, same

pytestmark = pytest.mark.parametrize("isa", TILED_SETS)
BF16 = torch.bfloat16


@examples(30)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=3),
    chunk_size=st.sampled_from([1, 7, 16, 24, 64, 128]),
    heads_per_group=st.integers(1, 5),
    head_dim=st.sampled_from([1, 3, 16, 24, 32, 40, 64, 80]),
    size=st.sampled_from([1, 4, 19, 32, 40, 128]),
    dt_limit=st.sampled_from([NO_LIMIT, (0.2, 0.7), (0.0, 1e-3)]),
    seed=st.integers(0, 2**31),
)
def test_it_equals_the_recurrence_with_the_same_bits_on_one_and_two_threads(
    isa: str,
    rows: list[tuple[int, int]],
    chunk_size: int,
    heads_per_group: int,
    head_dim: int,
    size: int,
    dt_limit: tuple[float, float],
    seed: int,
) -> None:
    """Rows begin on and off the multiples of a chunk and leave a checkpoint inside one. The states hold as much as
    float32 does: more than two bfloat16 numbers of each product."""
    spans = Rows([position for position, _ in rows], [length for _, length in rows])
    case = Case(spans.starts[-1], 2 * heads_per_group, head_dim, 2, size, seed, BF16, dt_limit)
    before = case.slots(1 + 3 * len(rows))
    for slot in filter(None, spans.reads):
        before[slot] = normal(seed + slot, *before.shape[1:])
    writes = [len(rows) + 1 + row for row in range(len(rows))]
    checkpoints = [(row, n // 2, 2 * len(rows) + 1 + row) for row, n in enumerate(spans.lengths) if n > 1]
    results = []
    for count in (1, 2):
        states = before.clone()
        with threads(count):
            results.append((run(isa, case, states, spans, writes, chunk_size, checkpoints), states))
    (out, states), other = results
    assert torch.equal(out, other[0])
    assert same(states, other[1])
    for row, (begin, end) in enumerate(zip(spans.starts, spans.starts[1:], strict=False)):
        if begin == end:
            continue
        y, after = case.follow(begin, end, before[spans.reads[row]] if spans.reads[row] else None)
        assert_near(out[begin:end], y, ROUNDING[BF16])
        assert_near(states[writes[row]], after[-1], 2e-6)
        for slot in (slot for of, _, slot in checkpoints if of == row):
            assert_near(states[slot], after[(end - begin) // 2 - 1], 2e-6)


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_a_prompt_that_is_cut_at_the_chunk_size_has_the_bits_of_the_whole(isa: str, state_dtype: torch.dtype) -> None:
    case = Case(300, 6, 64, 2, 128, 5, BF16)
    whole_states, states = case.slots(3, state_dtype), case.slots(2, state_dtype)
    whole = run(isa, case, whole_states, Rows([0], [300]), [1], 128, [(0, 128, 2)])
    first = run(isa, case, states, Rows([0], [128]), [1], 128)
    assert torch.equal(states[1], whole_states[2])
    second = run(isa, case, states, Rows([128], [172]), [1], 128, begin=128)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(states[1], whole_states[1])


def test_states_that_decay_for_long_lose_nothing_to_the_split_into_bfloat16(isa: str) -> None:
    """Each token's share of a state is there for thousands of tokens, and lost digits would add up."""
    case = Case(2048, 2, 32, 1, 64, 3, BF16)
    case.dt_bias -= 6
    case.B.abs_()  # sums grow, so that each addition loses as much as it can
    case.x.abs_()
    states = case.slots(2)
    out = run(isa, case, states, Rows([0], [2048]), [1], 128)
    y, after = case.follow(0, 2048, None)
    assert_near(states[1], after[-1], 2e-6)
    assert_near(out, y, ROUNDING[BF16])


def test_large_decays_and_states_that_fade_are_zero_in_the_end(isa: str) -> None:
    """Past the denormal numbers, which tiles take for zero, and which make vectors slow."""
    case = Case(200, 2, 24, 1, 40, 1, BF16, dt_limit=(40.0, math.inf))
    case.x[1:] = 0
    states = case.slots(3)
    out = run(isa, case, states, Rows([0], [200]), [1], 16, [(0, 1, 2)])
    y, after = case.follow(0, 1, None)
    assert_near(out[:1], y, ROUNDING[BF16])
    assert_near(states[2], after[0], 2e-6)
    assert (states[1] == 0).all()
    assert (out[4:] == 0).all()  # e^-160 at the most


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_what_is_not_finite_stays_so_in_its_own_head_and_row(isa: str, value: float) -> None:
    case = Case(100, 4, 16, 2, 32, 2, BF16)
    states, clean_states = case.slots(3), case.slots(3)
    rows = Rows([0, 0], [60, 40])
    clean = run(isa, case, clean_states, rows, [1, 2], 64)
    case.x[40, 1, 3] = value
    out = run(isa, case, states, rows, [1, 2], 64)
    assert not out[40:60, 1, 3].isfinite().any()
    assert not states[1][1, 3].isfinite().any()
    others = [0, 2, 3]
    assert torch.equal(out[:, others], clean[:, others])
    assert torch.equal(out[60:], clean[60:])
    assert torch.equal(out[:32], clean[:32])
    assert torch.equal(states[1][others], clean_states[1][others])
    assert torch.equal(states[2], clean_states[2])
