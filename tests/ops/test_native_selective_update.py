"""The native selective_update against the recurrence in float64, and its promise of the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference.stochastic_rounding import rounded
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, same_bits
from tests.support.native_sets import SETS
from tests.support.selective_cases import case_of, check_update, update

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
sizes = st.sampled_from([1, 4, 7, 8, 16, 19, 32, 64])


@few
@given(
    pasts=st.lists(st.sampled_from(["none", "own", "other"]), min_size=1, max_size=4),
    per_row=st.integers(1, 4),
    channels=st.sampled_from([1, 7, 16, 64, 65, 150]),
    size=sizes,
    dtype=dtypes,
    state_dtype=dtypes,
    padding=st.integers(0, 2),
    seed=seeds,
)
def test_each_row_goes_from_its_read_slot_to_its_write_slots(
    isa: str,
    pasts: list[str],
    per_row: int,
    channels: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    kernel = checked_kernel(isa, "selective_update")
    check_update(kernel, pasts, per_row, channels, size, dtype, state_dtype, padding, seed, keeps_null_slot=True)


@pytest.mark.parametrize("noise", [None, 4])
@pytest.mark.parametrize("size", [8, 16, 19])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_at_once_have_the_bits_of_tokens_one_by_one(
    isa: str, state_dtype: torch.dtype, size: int, noise: int | None
) -> None:
    """Whatever else is in the batch, also where a state is rounded in between, and where one is not kept."""
    kernel = checked_kernel(isa, "selective_update")
    case = case_of(6, 70, size, dtype=torch.bfloat16)
    states = case.slots(8, state_dtype)
    alone = states.clone()
    together = update(kernel, case, states, [4, 7], [[4, 5, 6], [1, 0, 3]], [0, 70], noise)
    for token, (read, write) in enumerate([(7, 1), (1, 2), (2, 3)], 3):
        out = update(kernel, case.tokens(token, token + 1), alone, [read], [[write]], [67 + token], noise)
        if token == 3:
            assert same_bits(alone[1], states[1])
        assert same_bits(out[0], together[token])
    assert same_bits(alone[3], states[3])


@few
@given(
    positions=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3),
    noise=st.integers(0, 2**20),
    channels=st.sampled_from([1, 20, 70]),
    size=st.sampled_from([1, 7, 16, 40]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=seeds,
)
def test_the_noise_of_stochastic_rounding_is_the_references(
    isa: str, positions: list[int], noise: int, channels: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    """A time step of 21 is itself, and states after a first token are that times x times B: x is a power of two over
    21, so that they are exact but for one rounding of step * x."""
    rows = len(positions)
    case = case_of(rows, channels, size, seed)
    case = replace(case, dt=torch.full((rows, channels), 21.0), dt_bias=torch.zeros(channels))
    case.B.copy_(case.B.sign() * case.B.abs().log2().round().exp2())
    states = case.slots(rows + 1, dtype)
    update(
        checked_kernel(isa, "selective_update"),
        *(case, states, [0] * rows, [[row + 1] for row in range(rows)], positions, noise),
    )
    exact = (21.0 * case.x).unsqueeze(-1) * case.B.unsqueeze(1)
    at = torch.tensor(positions, dtype=torch.int32)
    assert same_bits(states[1:], rounded(exact.unsqueeze(1), dtype, at, noise).squeeze(1))


def test_padding_cannot_reach_a_real_row(isa: str) -> None:
    """Padding tokens and rows whose inputs are NaN."""
    kernel = checked_kernel(isa, "selective_update")
    case = case_of(6, 70, 16)
    poisoned = replace(case, **{name: getattr(case, name).clone() for name in ("x", "dt", "B", "C")})
    for name in ("x", "dt", "B", "C"):
        getattr(poisoned, name)[[3, 4, 5]] = torch.nan
    clean, poison = case.slots(4), case.slots(4)
    expected = update(kernel, case, clean, [1, 2, 0], [[1, 3], [2, 0], [0, 0]])
    given = update(kernel, poisoned, poison, [1, 2, 0], [[1, 3], [2, 0], [0, 0]])
    assert same_bits(given[:3], expected[:3])
    assert same_bits(poison, clean)
    assert not expected[4:].any()


def test_time_steps_and_decays_are_right_from_the_smallest_to_the_largest(isa: str) -> None:
    """softplus of -40 to 40 with rates from e^-8 to e^8, seen in states of ones."""
    channels, size = 81, 17
    case = case_of(1, channels, size)
    case = replace(case, dt=torch.linspace(-40, 40, channels)[None], dt_bias=torch.zeros(channels))
    case = replace(case, A_log=torch.linspace(-8, 8, size).repeat(channels, 1), x=torch.zeros(1, channels))
    states = torch.ones(2, channels, size)
    update(checked_kernel(isa, "selective_update"), case, states, [1], [[1]])
    _, expected = case.follow(0, torch.ones(channels, size))
    # What is rounded in a logarithm is as large as the logarithm.
    torch.testing.assert_close(states[1].double(), expected, rtol=2e-5, atol=1e-37)


def test_no_rows_are_no_work(isa: str) -> None:
    case = case_of(2, 4, 16).tokens(0, 0)
    states = case.slots(2)
    before = states.clone()
    slots = (torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32))
    out = checked_kernel(isa, "selective_update")(*case.inputs, states, *slots)
    assert out.shape == (0, 4)
    assert same_bits(states, before)


def test_a_state_that_decayed_to_denormal_numbers_is_zero(isa: str) -> None:
    """Some processors calculate with them a hundred times slower."""
    case = replace(case_of(1, 4, 16), x=torch.zeros(1, 4))
    states = torch.full((2, 4, 16), 1e-40)
    update(checked_kernel(isa, "selective_update"), case, states, [1], [[1]])
    assert not states[1].any()
