"""The native scan of Mamba-2 (ssd_scan) against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.native_kernels import int32
from tests.support.native_sets import SETS, native_kernel, record, threads
from tests.support.scan_cases import NAN, NO_LIMIT, ROUNDING, Case, Rows, assert_near, decode, normal, run, same

few = examples(40)
seeds = st.integers(0, 2**31)
noises = st.sampled_from([None, 0, 7])
pytestmark = pytest.mark.parametrize("isa", SETS)


@few
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=4),
    chunk_size=st.sampled_from([1, 7, 16, 24, 64]),
    groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 6),
    head_dim=st.sampled_from([1, 3, 16, 24, 40, 64]),
    size=st.sampled_from([1, 4, 19, 32]),
    dtype=st.sampled_from(list(ROUNDING)),
    dt_limit=st.sampled_from([NO_LIMIT, (0.2, 0.7)]),
    seed=seeds,
)
def test_the_scan_equals_the_recurrence_with_the_same_bits_on_one_and_two_threads(
    isa: str,
    rows: list[tuple[int, int]],
    chunk_size: int,
    groups: int,
    heads_per_group: int,
    head_dim: int,
    size: int,
    dtype: torch.dtype,
    dt_limit: tuple[float, float],
    seed: int,
) -> None:
    """`rows` are (first position, tokens). A row leaves checkpoints at a third, at two thirds and at its end, on and
    off the multiples of the chunk size; one without tokens writes nothing; slot 0 and all unwritten slots are NaN."""
    spans = Rows([position for position, _ in rows], [length for _, length in rows])
    case = Case(spans.starts[-1], groups * heads_per_group, head_dim, groups, size, seed, dtype, dt_limit)
    before = case.slots(1 + 5 * len(rows))
    for slot in filter(None, spans.reads):
        before[slot] = normal(seed + slot, *before.shape[1:])
    fresh = iter(range(len(rows) + 1, len(before)))
    writes = [next(fresh) for _ in rows]
    checkpoints = [
        (row, offset, next(fresh))
        for row, length in enumerate(spans.lengths)
        for offset in sorted({length // 3, 2 * length // 3, length} - {0})
    ]
    results = []
    for count in (1, 2):
        states = before.clone()
        with threads(count):
            results.append((run(isa, case, states, spans, writes, chunk_size, checkpoints), states))
    (out, states), other = results
    assert torch.equal(out, other[0])
    assert same(states, other[1])

    written = set()
    for row, (begin, end) in enumerate(zip(spans.starts, spans.starts[1:], strict=False)):
        if begin == end:
            continue
        y, after = case.follow(begin, end, before[spans.reads[row]] if spans.reads[row] else None)
        assert_near(out[begin:end], y, ROUNDING[dtype])
        at = {writes[row]: end - begin} | {slot: offset for of, offset, slot in checkpoints if of == row}
        for slot, tokens in at.items():
            assert_near(states[slot], after[tokens - 1], 1e-5)
        written |= set(at)
    untouched = [slot for slot in range(len(states)) if slot not in written]
    assert same(states[untouched], before[untouched])


@few
@given(
    first=st.integers(0, 20),
    chunks_per_part=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    chunk_size=st.sampled_from([8, 16, 48]),
    groups=st.integers(1, 2),
    state_dtype=st.sampled_from(list(ROUNDING)),
    noise=noises,
    seed=seeds,
)
def test_a_prompt_that_is_cut_at_multiples_of_the_chunk_size_has_the_bits_of_the_whole(
    isa: str,
    first: int,
    chunks_per_part: list[int],
    chunk_size: int,
    groups: int,
    state_dtype: torch.dtype,
    noise: int | None,
    seed: int,
) -> None:
    """Multiples counted from the request's begin: the first token here, at position `first`, may be on none. A
    checkpoint at the cut is the state that the cut part leaves. States in 16 bits are rounded at the cuts anyway."""
    begin = first // chunk_size * chunk_size
    cuts = [begin + chunk_size * sum(chunks_per_part[: i + 1]) - first for i in range(len(chunks_per_part))]
    total = cuts[-1] + 5
    case = Case(total, 4, 20, groups, 24, seed)
    past = normal(seed, *case.slots(1).shape[1:])
    checkpoints = [(0, cut, 2 + i) for i, cut in enumerate(cuts)]
    whole_states, states = case.slots(2 + len(cuts), state_dtype), case.slots(2, state_dtype)
    whole_states[1] = states[1] = past
    whole = run(isa, case, whole_states, Rows([first], [total]), [1], chunk_size, checkpoints, noise=noise)
    at = 0
    for i, cut in enumerate([*cuts, total]):
        part = run(isa, case, states, Rows([first + at], [cut - at]), [1], chunk_size, begin=at, noise=noise)
        assert torch.equal(part, whole[at:cut])
        assert torch.equal(states[1], whole_states[2 + i if i < len(cuts) else 1])
        at = cut


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_checkpoints(isa: str, count: int) -> None:
    """Sizes of a real model; many rows are shared out in parts of more heads than one."""
    rows = Rows([0, 256, 0, 112, 480], [300, 128, 37, 200, 16])
    case = Case(rows.starts[-1], 8, 64, 2, 128, dtype=torch.bfloat16)
    together = case.slots(16)
    together[1:6] = normal(9, *together[1:6].shape)
    before = together.clone()
    checkpoints = [(3, 100, 15), (0, 128, 11), (0, 288, 12), (1, 128, 13), (3, 16, 14)]
    with threads(count):
        out = run(isa, case, together, rows, [row + 6 for row in range(5)], 128, checkpoints)
    for row in range(5):
        alone = before[[0, row + 1]]
        span = slice(rows.starts[row], rows.starts[row + 1])
        given = run(isa, case, alone, Rows([rows.positions[row]], [rows.lengths[row]]), [1], 128, begin=span.start)
        assert torch.equal(given, out[span])
        assert torch.equal(alone[1], together[row + 6])
    assert torch.equal(together[13], together[7])


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 8, 128), (3, 1, 256), (4, 1, 64)])
def test_inputs_in_bfloat16_cost_the_state_nothing_and_the_outputs_one_rounding(
    isa: str, heads: int, groups: int, size: int
) -> None:
    case = Case(512, heads, 64, groups, size, dtype=torch.bfloat16)
    case.dt_bias -= 4  # decays so slow that the state remembers all tokens
    states = case.slots(2)
    out = run(isa, case, states, Rows([0], [512]), [1], 256)
    y, after = case.follow(0, 512, None)
    assert_near(out, y, 2.0**-8)
    assert_near(states[1], after[-1], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", [None, 3])
def test_a_narrow_state_is_rounded_after_each_whole_chunk_and_where_it_is_written(
    isa: str, dtype: torch.dtype, noise: int | None
) -> None:
    """After a checkpoint inside a chunk the scan goes on with what was not rounded."""
    case = Case(50, 2, 20, 1, 19)
    states = case.slots(7, dtype)
    wanted = [(0, 16, 2), (0, 21, 3), (0, 32, 4), (0, 48, 5), (0, 50, 6)]
    out = run(isa, case, states, Rows([0], [50]), [1], 16, wanted, noise=noise)
    before = None
    for begin, end, slot in ((0, 16, 2), (16, 32, 4), (32, 48, 5), (48, 50, 6)):
        y, after = case.follow(begin, end, before)
        assert_near(out[begin:end], y, 1e-5)
        assert_near(states[slot], after[-1], ROUNDING[dtype] * (1 if noise is None else 2))
        if slot == 4:
            assert_near(states[3], after[21 - 16 - 1], ROUNDING[dtype] * (1 if noise is None else 2))
        before = states[slot]
    assert torch.equal(states[1], states[6])


def test_large_decays_neither_overflow_nor_forget_the_newest_token(isa: str) -> None:
    case = Case(64, 2, 8, 1, 16)
    case.dt_bias += 40
    states = case.slots(2)
    out = run(isa, case, states, Rows([0], [64]), [1])
    y, after = case.follow(0, 64, None)
    assert_near(out, y, 1e-5)
    assert_near(states[1], after[-1], 1e-5)


def test_states_fade_to_zero_past_the_denormal_numbers(isa: str) -> None:
    """Which a CPU multiplies tens of times slower. Only the first token adds to the state."""
    case = Case(200, 1, 16, 1, 16, dt_limit=(1.1, 1.1))
    case.x[1:] = 0
    states = case.slots(40)
    checkpoints = [(0, offset, 2 + i) for i, offset in enumerate(range(5, 195, 5))]
    run(isa, case, states, Rows([0], [200]), [1], 16, checkpoints)
    tiny = torch.finfo(torch.float32).tiny
    assert ((states[1:] == 0) | (states[1:].abs() >= tiny)).all()
    assert (states[2] != 0).all()
    assert (states[1] == 0).all()


def test_a_replay_with_fewer_tokens_leaves_the_rows_behind_them_alone(isa: str) -> None:
    case = Case(40, 4, 8, 2, 16)
    states, expected = case.slots(3), case.slots(3)
    head = (case.x, case.dt, case.A_log, case.B, case.C, case.D, case.dt_bias, case.dt_limit, 16)
    rows = (int32([0, 25, 40]), int32([0, 0]), int32([0, 0]), int32([1, 2]), [(1, 10, 2)])
    out = torch.full(case.x.shape, NAN)
    record(isa, native_kernel(isa, "ssd_scan"), out, *head, states, *rows).run(25)
    y = run(isa, case, expected, Rows([0], [25]), [1], 16)
    assert torch.equal(out[:25], y)
    assert out[25:].isnan().all()
    assert torch.equal(states[1], expected[1])
    assert states[2].isnan().all()


@few
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 40]), min_size=1, max_size=4),
    groups=st.integers(1, 2),
    heads_per_group=st.integers(1, 6),
    head_dim=st.sampled_from([3, 16, 24]),
    size=st.sampled_from([4, 19, 32, 128]),
    dtype=st.sampled_from(list(ROUNDING)),
    state_dtype=st.sampled_from(list(ROUNDING)),
    has_past=st.booleans(),
    count=st.integers(1, 2),
    noise=noises,
    seed=seeds,
)
def test_a_recurrent_scan_has_the_bits_of_decoding_token_by_token_wherever_it_is_cut(
    isa: str,
    lengths: list[int],
    groups: int,
    heads_per_group: int,
    head_dim: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    has_past: bool,
    count: int,
    noise: int | None,
    seed: int,
) -> None:
    """`lengths` are the parts of a prompt. Each leaves checkpoints inside and at its end."""
    total = sum(lengths)
    case = Case(total, groups * heads_per_group, head_dim, groups, size, seed, dtype)
    first = 5 if has_past else 0
    decoded = case.slots(2 + total, state_dtype)
    past = normal(seed, *decoded.shape[1:]).to(state_dtype)
    states = case.slots(4, state_dtype)
    decoded[1] = states[1] = past
    expected = [
        decode(isa, case, decoded, token, token + 1 if token or has_past else 0, token + 2, first + token, noise)
        for token in range(total)
    ]
    at = 0
    for length in lengths:
        rows = Rows([first + at], [length])
        before = states.clone()
        with threads(count):
            wanted = [(0, length // 2, 2), (0, length, 3)]
            part = run(isa, case, states, rows, [1], 16, wanted, at, recurrent=True, noise=noise)
        if length == 0:
            assert same(states, before)
            continue
        assert torch.equal(part, torch.cat(expected[at : at + length]))
        at += length
        assert torch.equal(states[1], decoded[at + 1])
        assert torch.equal(states[3], decoded[at + 1])
        if length > 1:
            assert torch.equal(states[2], decoded[at + 1 - length + length // 2])


def test_a_row_of_a_recurrent_scan_has_the_same_bits_in_any_batch(isa: str) -> None:
    rows = Rows([0, 256, 0, 112], [40, 0, 37, 20])
    case = Case(rows.starts[-1], 8, 64, 2, 128, dtype=torch.bfloat16)
    together = case.slots(9)
    together[1:5] = normal(9, *together[1:5].shape)
    before = together.clone()
    with threads(2):
        out = run(isa, case, together, rows, [row + 5 for row in range(4)], recurrent=True)
    for row in (0, 2, 3):
        alone = before[[0, row + 1]]
        span = slice(rows.starts[row], rows.starts[row + 1])
        one = Rows([rows.positions[row]], [rows.lengths[row]])
        given = run(isa, case, alone, one, [1], begin=span.start, recurrent=True)
        assert torch.equal(given, out[span])
        assert torch.equal(alone[1], together[row + 5])
    assert together[6].isnan().all()
