"""The native delta_update and delta_scan against the rule in float64, and their promise of the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference import delta
from tests.support.delta_cases import DeltaCase, delta_case, with_betas
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, int32, rounding, same_bits, spaced
from tests.support.native_sets import SETS, native_kernel, record, threads

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
bounded = st.sampled_from([0.0, -5.0])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
bounds = st.sampled_from(["least", "largest", "either", "any"])
strengths = st.sampled_from([-12.0, -6.0, 0.0, 4.0, 12.0])
sizes = st.sampled_from([1, 3, 8, 16, 20, 32, 37, 64, 96, 128, 160])


def apart(case: DeltaCase) -> DeltaCase:
    """With NaN between the tokens."""
    parts = {name: spaced(getattr(case, name), gap) for gap, name in enumerate(("q", "k", "v", "a", "b"), 1)}
    return replace(case, **parts)


def update(isa: str, case: DeltaCase, states: torch.Tensor, reads: list[int], writes: list[list[int]]) -> torch.Tensor:
    return checked_kernel(isa, "delta_update")(*case.args(), states, int32(reads), int32(writes))


def close(given: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Each element but for its rounding, and that of sums whose terms are as large as the largest element."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(given.double(), expected, rtol=rounding(dtype), atol=1e-5 * (1 + largest))


# delta_update


@few
@given(
    pasts=st.lists(st.sampled_from(["none", "own", "other"]), min_size=1, max_size=3),
    per_row=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    heads_per_key=st.integers(1, 3),
    key_dim=sizes,
    value_dim=sizes,
    per_channel=st.booleans(),
    beta_scale=st.sampled_from([1.0, 2.0]),
    decay_bound=bounded,
    strength=strengths,
    betas=bounds,
    dtype=dtypes,
    padding=st.integers(0, 2),
    seed=seeds,
)
def test_each_row_goes_from_its_read_slot_to_its_write_slots(
    isa: str,
    pasts: list[str],
    per_row: int,
    key_heads: int,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    per_channel: bool,
    beta_scale: float,
    decay_bound: float,
    strength: float,
    betas: str,
    dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    """A row starts from zeros, from the first slot that it writes, or from one that it does not. Of the first row's
    tokens one is kept nowhere, if there are several. Padding rows give zeros. Other slots keep what they hold."""
    rows = len(pasts)
    shape = {"key_heads": key_heads, "heads_per_key": heads_per_key, "key_dim": key_dim, "value_dim": value_dim}
    options = {"per_channel": per_channel, "beta_scale": beta_scale, "decay_bound": decay_bound, "strength": strength}
    tokens = (rows + padding) * per_row
    case = apart(with_betas(delta_case(tokens, **shape, **options, seed=seed, dtype=dtype), betas))
    states = case.slots(rows * (per_row + 1) + 1, seed=seed)
    writes = [[row * (per_row + 1) + 1 + i for i in range(per_row)] for row in range(rows)]
    if per_row > 1:
        writes[0][seed % per_row] = 0
    reads = [
        {"none": 0, "own": own[0], "other": row * (per_row + 1) + per_row + 1}[past]
        for row, (past, own) in enumerate(zip(pasts, writes, strict=True))
    ]
    before = states.clone()
    out = update(isa, case, states, reads + [0] * padding, writes + [[0] * per_row] * padding)
    assert not out[rows * per_row :].any()
    for row in range(rows):
        first = row * per_row
        expected, after = case.follow(first, first + per_row, before[reads[row]] if reads[row] else None)
        close(out[first : first + per_row], expected, dtype)
        for write, state in zip(writes[row], after, strict=True):
            if write:
                close(states[write], state)
                before[write] = states[write]
    assert same_bits(states, before), "a slot was written that is nobody's"


@pytest.mark.parametrize("value_dim", [37, 128])
def test_tokens_at_once_have_the_bits_of_tokens_one_by_one(isa: str, value_dim: int) -> None:
    """Whatever else is in the batch, and also where the state goes to memory in between."""
    rows, per_row = 3, 4
    case = delta_case(rows * per_row, key_heads=2, key_dim=20, value_dim=value_dim, dtype=torch.bfloat16)
    states = case.slots(1 + rows * (per_row + 1))
    reads = [0, 6, 12]
    writes = [[1, 2, 3, 4], [6, 7, 8, 9], [11, 13, 14, 15]]
    alone = states.clone()
    together = update(isa, case, states, reads, writes)
    for row in range(rows):
        read = reads[row]
        for i, write in enumerate(writes[row]):
            token = row * per_row + i
            one = (*case.args(token, token + 1), alone, int32([read]), int32([[write]]))
            assert same_bits(native_kernel(isa, "delta_update")(*one)[0], together[token])
            read = write
    assert same_bits(alone, states)


def test_padding_cannot_reach_a_real_row(isa: str) -> None:
    """Padding tokens and rows whose inputs are NaN."""
    case = delta_case(6, key_dim=16, value_dim=32)
    poisoned = replace(case, **{name: getattr(case, name).clone() for name in ("q", "k", "v", "a", "b")})
    for name in ("q", "k", "v", "a", "b"):
        getattr(poisoned, name)[[3, 4, 5]] = torch.nan
    clean, poison = case.slots(4), case.slots(4)
    expected = update(isa, case, clean, [1, 2, 0], [[1, 3], [2, 0], [0, 0]])
    given = update(isa, poisoned, poison, [1, 2, 0], [[1, 3], [2, 0], [0, 0]])
    assert same_bits(given[:3], expected[:3])
    assert not expected[:3].isnan().any()
    assert same_bits(poison, clean)


def test_no_rows_are_no_work(isa: str) -> None:
    case = delta_case(0)
    states = case.slots(2)
    before = states.clone()
    slots = (torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32))
    assert checked_kernel(isa, "delta_update")(*case.args(), states, *slots).shape == (0, 2, 3)
    assert same_bits(states, before)


@pytest.mark.parametrize("name", ["delta_update", "delta_scan"])
def test_states_of_16_bits_are_refused(isa: str, name: str) -> None:
    case = delta_case(1)
    states = case.slots(2).bfloat16()
    rows = (int32([0]), int32([[1]])) if name == "delta_update" else (int32([0, 1]), *[int32([0])] * 3)
    with pytest.raises(AssertionError, match=r"states is bfloat16"):
        native_kernel(isa, name)(*case.args(), states, *rows)


# delta_scan


@few
@given(
    rows=st.lists(st.tuples(st.integers(0, 80), st.sampled_from([0, 16, 48, 77])), min_size=1, max_size=3),
    key_heads=st.integers(1, 2),
    heads_per_key=st.integers(1, 2),
    key_dim=sizes,
    value_dim=sizes,
    per_channel=st.booleans(),
    beta_scale=st.sampled_from([1.0, 2.0]),
    decay_bound=bounded,
    strength=strengths,
    betas=bounds,
    dtype=dtypes,
    seed=seeds,
)
def test_a_scan_has_the_bits_of_updates_and_follows_the_rule(
    isa: str,
    rows: list[tuple[int, int]],
    key_heads: int,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    per_channel: bool,
    beta_scale: float,
    decay_bound: float,
    strength: float,
    betas: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Ragged rows whose states are also written out on the way. So it does not matter where a prompt is cut."""
    starts = [sum(length for length, _ in rows[:i]) for i in range(len(rows) + 1)]
    shape = {"key_heads": key_heads, "heads_per_key": heads_per_key, "key_dim": key_dim, "value_dim": value_dim}
    options = {"per_channel": per_channel, "beta_scale": beta_scale, "decay_bound": decay_bound, "strength": strength}
    case = apart(with_betas(delta_case(starts[-1], **shape, **options, seed=seed, dtype=dtype), betas))
    states = case.slots(1 + 8 * len(rows), seed=seed)
    before = states.clone()
    reads = [row + 1 if position else 0 for row, (_, position) in enumerate(rows)]
    writes = [len(rows) + 1 + row for row in range(len(rows))]
    marks = [
        (row, offset, 2 * len(rows) + 1 + row * 6 + i)
        for row, (length, position) in enumerate(rows)
        for i, offset in enumerate(range(16 - position % 16, length + 1, 16))
    ]
    columns = int32([[write, 99] for write in writes])[:, 0]
    positions = int32([position for _, position in rows])
    scan = checked_kernel(isa, "delta_scan")
    out = scan(*case.args(), states, int32([at + 3 for at in starts]), positions, int32(reads), columns, marks)
    step = native_kernel(isa, "delta_update")
    for row, (length, _) in enumerate(rows):
        begin, at = starts[row], {offset: slot for of_row, offset, slot in marks if of_row == row}
        if not length:
            continue
        expected, _ = case.follow(begin, begin + length, before[reads[row]] if reads[row] else None)
        close(out[begin : begin + length], expected, dtype)
        alone, read = before[: len(rows) + 1].clone(), reads[row]
        alone = torch.cat((alone, alone[:1]))
        for t in range(length):
            token = (*case.args(begin + t, begin + t + 1), alone, int32([read]), int32([[len(alone) - 1]]))
            assert same_bits(step(*token)[0], out[begin + t])
            read = len(alone) - 1
            if t + 1 in at:
                assert same_bits(states[at[t + 1]], alone[read])
        assert same_bits(states[writes[row]], alone[read])
    written = {*(writes[row] for row, (length, _) in enumerate(rows) if length), *(slot for _, _, slot in marks)}
    kept = sorted(set(range(len(states))) - written)
    assert same_bits(states[kept], before[kept])


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_reaches_later_tokens_of_its_row_alone(
    isa: str, poison: float, name: str, per_channel: bool
) -> None:
    """Not other rows, and of its own neither earlier tokens nor a state after those. One row is empty."""
    case = delta_case(60, key_dim=20, value_dim=37, per_channel=per_channel)
    poisoned = replace(case, **{name: getattr(case, name).clone()})
    getattr(poisoned, name)[29] = poison
    rows = (int32([0, 10, 40, 40, 60]), *[int32([0, 0, 0, 0])] * 2, int32([1, 2, 3, 4]), [(1, 16, 5)])
    clean, reached = case.slots(6), case.slots(6)
    scan = checked_kernel(isa, "delta_scan")
    expected, given = scan(*case.args(), clean, *rows), scan(*poisoned.args(), reached, *rows)
    assert not expected.isnan().any()
    assert same_bits(given[:29], expected[:29])
    assert same_bits(given[40:], expected[40:])
    assert same_bits(reached[[1, 3, 4, 5]], clean[[1, 3, 4, 5]])
    if poison != poison:
        assert given[29].isnan().all()
        assert given[30:40].isnan().all() == (name != "q")
        assert reached[2].isnan().any() == (name != "q")


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_long_prompt_of_common_heads_is_that_of_the_reference(isa: str, per_channel: bool) -> None:
    case = delta_case(300, heads_per_key=3, key_dim=128, value_dim=128, per_channel=per_channel, strength=-2)
    native, reference = case.slots(3), case.slots(3)
    rows = (int32([0, 300]), int32([20]), int32([1]), int32([2]))
    out = checked_kernel(isa, "delta_scan")(*case.args(), native, *rows)
    exact = case.exactly()
    reference = reference.double()
    close(out, delta.delta_scan(*exact.args(), reference, *rows))
    close(native[1:], reference[1:])


def test_threads_share_the_columns_of_a_head(isa: str) -> None:
    """With so many threads that a head has several."""
    case = delta_case(40, heads_per_key=1, key_dim=32, value_dim=160)
    rows = (int32([0, 40]), int32([0]), int32([1]), int32([2]))
    one, many = case.slots(3), case.slots(3)
    with threads(1):
        expected = native_kernel(isa, "delta_scan")(*case.args(), one, *rows)
    with threads(5):
        given = native_kernel(isa, "delta_scan")(*case.args(), many, *rows)
    assert same_bits(given, expected)
    assert same_bits(many, one)


def test_a_replay_leaves_padding_at_the_end_out(isa: str) -> None:
    case = delta_case(30, key_dim=16, value_dim=16)
    rows = (int32([0, 10, 30]), int32([0, 0]), int32([0, 0]), int32([1, 2]))
    states, expected = case.slots(3), case.slots(3)
    out = torch.full_like(case.v, torch.nan)
    record(isa, native_kernel(isa, "delta_scan"), out, *case.args(), states, *rows).run(25)
    shorter = (int32([0, 10, 25]), *rows[1:])
    right = native_kernel(isa, "delta_scan")(*case.args(0, 25), expected, *shorter)
    assert same_bits(out[:25], right)
    assert out[25:].isnan().all()
    assert same_bits(states, expected)
