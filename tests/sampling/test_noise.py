"""The sampling noise: a pure function with the distribution it claims."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ostinato.ops import noise
from ostinato.ops.arrays import noise_keys
from ostinato.ops.seeds import GUMBEL_MAX, GUMBEL_MIN, derive_seed


def scalar_hash(seed: int, position: int, token: int) -> int:
    """The 32-bit hash with Python's unbounded integers, as the docstring describes it."""
    first, second = (word % 2**32 for word in noise_keys([(seed, position)])[0].tolist())

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    return mix((mix(token ^ first) + second) % 2**32)


def scalar_gumbel(seed: int, position: int, token: int) -> float:
    bits = scalar_hash(seed, position, token)
    distance = (bits % 2**31 + 0.5) / 2**32
    return -math.log(-math.log(distance) if bits >= 2**31 else -math.log1p(-distance))


def gumbel(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(noise.gumbel(noise_keys([(seed, position)]), tokens.int().numpy()))


def uniform(values: torch.Tensor) -> torch.Tensor:
    """The distribution function of Gumbel, which makes the noise uniform."""
    return (-(-values.double()).exp()).exp()


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Standardised: about normal with mean 0 and deviation 1 if the expectation is right."""
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = observed.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_vectorised_noise_is_the_scalar_definition() -> None:
    tokens = torch.arange(0, 200_000, 37)
    for seed, position in [(0, 0), (1, 0), (0, 1), (2**64 - 1, 131_071), (-5, 17)]:
        values = gumbel(seed, position, tokens)
        expected = torch.tensor([scalar_gumbel(seed, position, t) for t in tokens.tolist()])
        torch.testing.assert_close(values, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("seed", "position", "token", "bits", "value"),
    [
        (0, 0, 0, 0x1FE385E6, 2.0171436),
        (0, 0, 1, 0x59922C3E, 0.8425558),
        (42, 100, 31_999, 0x87D33F76, -1.2492797),
        (2**64 - 1, 131_071, 151_935, 0x298D462F, 1.7309873),
    ],
)
def test_noise_of_given_inputs_never_changes(seed: int, position: int, token: int, bits: int, value: float) -> None:
    assert scalar_hash(seed, position, token) == bits
    assert gumbel(seed, position, torch.tensor([token])).item() == pytest.approx(value, rel=1e-6)


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    everything = gumbel(3, 14, torch.arange(100_000))
    generator = torch.Generator().manual_seed(0)
    for count in [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 1000, 4097]:
        some = torch.randperm(100_000, generator=generator)[:count]
        assert torch.equal(gumbel(3, 14, some), everything[some])


def test_rows_get_their_own_noise() -> None:
    pairs = [(1, 2), (2, 1), (1, 3)]
    together = torch.from_numpy(noise.gumbel(noise_keys(pairs)[:, None], np.arange(64, dtype=np.int32)))
    assert together.shape == (3, 64)
    for row, (seed, position) in enumerate(pairs):
        assert torch.equal(together[row], gumbel(seed, position, torch.arange(64)))


@pytest.mark.parametrize("along", ["seeds", "positions", "tokens"])
def test_noise_is_uniform_along_every_input(along: str) -> None:
    count = 1 << 16
    pairs = {
        "seeds": [(seed, 7) for seed in range(count)],
        "positions": [(7, position) for position in range(count)],
        "tokens": [(7, 7)],
    }[along]
    tokens = torch.arange(count) if along == "tokens" else torch.tensor([5])
    values = uniform(torch.from_numpy(noise.gumbel(noise_keys(pairs), tokens.int().numpy())))
    observed = torch.histc(values.float(), bins=256, min=0, max=1)
    assert abs(chi_square(observed, torch.full((256,), count / 256))) < 4


@pytest.mark.parametrize("along", ["seeds", "positions", "tokens", "seed and position"])
def test_neighbours_along_every_input_are_independent(along: str) -> None:
    count, bins = 1 << 15, 16
    tokens = torch.arange(count)
    if along == "tokens":
        values = uniform(gumbel(1, 1, torch.arange(count + 1)))
        left, right = values[:-1], values[1:]
    elif along == "seed and position":
        # A sum of the two must not be all that counts.
        left = uniform(gumbel(10, 11, tokens))
        right = uniform(gumbel(11, 10, tokens))
    else:
        left = uniform(gumbel(10, 10, tokens))
        right = uniform(gumbel(11, 10, tokens) if along == "seeds" else gumbel(10, 11, tokens))
    cells = (left * bins).long() * bins + (right * bins).long()
    observed = torch.bincount(cells, minlength=bins * bins).float()
    assert abs(chi_square(observed, torch.full((bins * bins,), count / bins**2))) < 4


def test_both_tails_are_resolved() -> None:
    extremes = np.array([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1], dtype=np.uint32)
    values = torch.from_numpy(noise.gumbel_of(extremes))
    halves = [0.5, 1.5, 2**31 - 0.5]
    survival = [-math.log1p(-h / 2**32) for h in halves] + [-math.log(h / 2**32) for h in halves]
    torch.testing.assert_close(values, torch.tensor([-math.log(e) for e in survival]), rtol=1e-6, atol=1e-6)
    assert values[0].item() == pytest.approx(GUMBEL_MAX, rel=1e-6)
    assert values[3].item() == pytest.approx(GUMBEL_MIN, rel=1e-6)


def test_a_million_draws_reach_the_tails_as_often_as_they_should() -> None:
    values = gumbel(123, 456, torch.arange(1 << 20))
    for threshold in (-2.0, -1.0, 3.0, 6.0, 9.0):
        expected = (1 << 20) * -math.expm1(-math.exp(-threshold))
        if threshold < 0:
            expected = (1 << 20) * math.exp(-math.exp(-threshold))
            seen = (values < threshold).sum().item()
        else:
            seen = (values > threshold).sum().item()
        assert abs(seen - expected) < 4.5 * math.sqrt(expected)


def test_the_argmax_of_logits_plus_noise_follows_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, generator=generator) * 1.5
    draws = 40_000
    keys = noise_keys([(99, position) for position in range(draws)])
    picks = (logits + torch.from_numpy(noise.gumbel(keys[:, None], np.arange(24, dtype=np.int32)))).argmax(-1)
    observed = torch.bincount(picks, minlength=24).float()
    assert abs(chi_square(observed, logits.softmax(-1) * draws)) < 4


def test_samples_of_one_request_get_seeds_of_their_own_and_the_first_keeps_it() -> None:
    assert derive_seed(17, 0) == 17
    assert derive_seed(-1, 0) == 2**64 - 1
    seeds = {derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
