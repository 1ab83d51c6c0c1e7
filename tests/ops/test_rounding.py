"""Stochastic rounding of states: what it may give, and that its noise is noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.noise import mix as mix_in_numpy
from ostinato.ops.reference.ssd import _gathered, _row_by_row
from ostinato.ops.reference.stochastic_rounding import WORD_BITS, mix, noise_of, round_stochastically, rounded
from tests.support.examples import examples

few = examples(60)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def at(*positions: int) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The greatest number of `dtype` that is no more than `value`, and the least that is no less."""
    near = torch.tensor(value).to(dtype)
    below = near if near.double() <= value else torch.nextafter(near, torch.tensor(-math.inf, dtype=dtype))
    above = near if near.double() >= value else torch.nextafter(near, torch.tensor(math.inf, dtype=dtype))
    return float(below), float(above)


def test_the_bijection_is_that_of_samples_bit_by_bit() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    words[:4] = 0, 1, 2**31, 2**32 - 1
    mixed = mix(torch.from_numpy(words.view(np.int32).copy()))
    assert mixed.numpy().view(np.uint32).tolist() == mix_in_numpy(words).tolist()


@dtypes
@few
@given(
    value=st.floats(-65535, 65535, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32),
    noise=st.integers(0, 2**16 - 1),
)
def test_a_value_becomes_one_of_its_neighbours(dtype: torch.dtype, value: float, noise: int) -> None:
    words = torch.tensor([0, noise, 2**16 - 1], dtype=torch.int32)
    least, given_, most = round_stochastically(torch.full((3,), value), dtype, words).tolist()
    below, above = neighbours(value, dtype)
    assert {least, given_, most} <= {below, above}
    assert abs(least) <= abs(given_) <= abs(most)
    if dtype == torch.float16 and abs(value) < 2**-14:
        return  # what lies below 2^-37 is cut off
    assert abs(least) == min(abs(below), abs(above)), "without noise, towards zero"


@dtypes
def test_what_the_dtype_can_hold_stays_as_it_is(dtype: torch.dtype) -> None:
    """All of its numbers, with any noise."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype == torch.bfloat16:
        numbers = numbers[(numbers.float().abs() >= torch.finfo(torch.float32).tiny) | (numbers == 0)]
    for noise in (0, 1, 2**15, 2**16 - 1):
        given_ = round_stochastically(numbers.float(), dtype, torch.full((len(numbers),), noise, dtype=torch.int32))
        assert torch.equal(given_.isnan(), numbers.isnan())
        assert torch.equal(given_.nan_to_num(1.0).view(torch.int16), numbers.nan_to_num(1.0).view(torch.int16))


@dtypes
@pytest.mark.parametrize("value", [1.2345, -0.0123, 3.3e-6, 777.7])
def test_over_all_noise_the_mean_is_the_value(dtype: torch.dtype, value: float) -> None:
    words = torch.arange(2**WORD_BITS, dtype=torch.int32)
    values = torch.full((len(words),), value)
    mean = round_stochastically(values, dtype, words).double().mean()
    below, above = neighbours(float(values[0]), dtype)
    assert float(mean) == pytest.approx(float(values[0].double()), abs=(above - below) * 2**-12)


@dtypes
def test_a_state_gains_what_each_step_is_too_small_to_add(dtype: torch.dtype) -> None:
    """Where the nearest value is always the old one."""
    step = 1 + torch.finfo(dtype).eps / 5
    shape = (1, 2, 16, 64)
    by_noise = nearest = torch.ones(shape, dtype=dtype)
    for position in range(200):
        by_noise = rounded(by_noise.float() * step, dtype, at(position), 1)
        nearest = rounded(nearest.float() * step, dtype, at(position), None)
    assert (nearest == 1).all()
    assert float(by_noise.double().mean()) == pytest.approx(step**200, rel=torch.finfo(dtype).eps)


def test_noise_is_uniform_and_that_of_two_places_tokens_or_layers_has_nothing_in_common() -> None:
    first = noise_of(at(*range(100, 150)), 3, 4, 16, 64)
    assert torch.equal(first[11:12], noise_of(at(111), 3, 4, 16, 64)), "a function of the position alone"
    pairs = {
        "tokens": (first[1:], first[:-1]),
        "layers": (first, noise_of(at(*range(100, 150)), 4, 4, 16, 64)),
        "heads": (first[:, 1:], first[:, :-1]),
        "channels": (first[:, :, 1:], first[:, :, :-1]),
        "columns": (first[..., 1:], first[..., :-1]),
    }
    counts = torch.bincount(first.flatten() >> (WORD_BITS - 4), minlength=16)
    assert counts.sum() == first.numel()
    assert (counts.double() / counts.sum() * 16 - 1).abs().max() < 0.1
    for name, (one, other) in pairs.items():
        together = torch.stack((one.flatten(), other.flatten())).double()
        assert abs(float(torch.corrcoef(together)[0, 1])) < 0.06, name


@dtypes
def test_both_forms_of_the_update_round_alike(dtype: torch.dtype) -> None:
    """From zeros, so that both have the same float32 states: one row by another, and all rows at once."""
    rows, per_row, heads, head_dim, size = 3, 1, 2, 4, 8
    generator = torch.Generator().manual_seed(1)
    scaled = torch.randn(rows * per_row, heads, head_dim, generator=generator)
    B, C = torch.randn(2, rows * per_row, 1, size, generator=generator)
    decay = torch.ones(rows * per_row, heads)
    kept = []
    for update in (_row_by_row, _gathered):
        states = torch.zeros(rows + 1, heads, head_dim, size, dtype=dtype)
        slots = (torch.zeros(rows, dtype=torch.int32), at(1, 2, 3).unsqueeze(1))
        update(decay, scaled, B, C, states, *slots, at(0, 500, 7), 2, False)
        kept.append(states[1:])
    assert torch.equal(*kept)
