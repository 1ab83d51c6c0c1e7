"""Triton's sampling: the noise of the reference bit by bit, and its tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops import noise
from ostinato.ops.arrays import noise_keys
from ostinato.ops.seeds import GUMBEL_MAX, GUMBEL_MIN
from tests.support.triton_kernels import DEVICE, check, require_triton, run_both

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ostinato.ops.triton.common import noise_bits, to_gumbel  # noqa: E402


@triton.jit
def write_noise(key, words, gumbel, FIRST: tl.constexpr, COUNT: tl.constexpr):
    token = FIRST + tl.arange(0, COUNT)
    low = tl.load(key).to(tl.uint32, bitcast=True)
    high = tl.load(key + 1).to(tl.uint32, bitcast=True)
    bits = noise_bits(token.to(tl.uint32), low, high)
    tl.store(words + tl.arange(0, COUNT), bits.to(tl.int32, bitcast=True))
    tl.store(gumbel + tl.arange(0, COUNT), to_gumbel(bits))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20), first=st.sampled_from([0, 4096, 200_000]))
def test_the_noise_is_that_of_the_reference_bit_by_bit(seed: int, position: int, first: int) -> None:
    keys = noise_keys([(seed, position)])
    tokens = first + np.arange(1024, dtype=np.int32)
    words = torch.empty(1024, dtype=torch.int32, device=DEVICE)
    gumbel = torch.empty(1024, device=DEVICE)
    write_noise[(1,)](torch.from_numpy(keys).to(DEVICE), words, gumbel, FIRST=first, COUNT=1024)
    first_word, second_word = keys.view(np.uint32)[0]
    expected = noise.mix(noise.mix(tokens.view(np.uint32) ^ first_word) + second_word)
    assert words.cpu().numpy().view(np.uint32).tolist() == expected.tolist()
    torch.testing.assert_close(gumbel.cpu(), torch.from_numpy(noise.gumbel(keys, tokens)), rtol=2e-6, atol=1e-6)


@triton.jit
def write_gumbel(words, gumbel, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(gumbel + place, to_gumbel(tl.load(words + place).to(tl.uint32, bitcast=True)))


def test_the_tails_of_the_noise_are_as_fine_as_the_references() -> None:
    words = torch.tensor([0, 1, 2, 255, 2**20, 2**31 - 1, -(2**31), -(2**31) + 1], dtype=torch.int32)
    gumbel = torch.empty(8, device=DEVICE)
    write_gumbel[(1,)](words.to(DEVICE), gumbel, COUNT=8)
    expected = torch.from_numpy(noise.gumbel_of(words.numpy().view(np.uint32)))
    torch.testing.assert_close(gumbel.cpu(), expected, rtol=2e-6, atol=1e-6)
    assert gumbel.max().item() == pytest.approx(GUMBEL_MAX, rel=1e-6)
    assert gumbel.min().item() == pytest.approx(GUMBEL_MIN, rel=1e-6)


ROW = st.tuples(
    st.sampled_from([0.0, 1e-3, 0.7, 1.0, 50.0]),
    st.sampled_from([0, 1, 5, 10**6]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.1, 1.0]),
)


@settings(max_examples=12)
@given(rows=st.lists(ROW, min_size=1, max_size=2), vocab_size=st.sampled_from([1, 7, 1025]), seed=st.integers(0, 99))
@pytest.mark.slow
def test_tokens_are_those_of_the_reference(rows: list[tuple[float, ...]], vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(len(rows), vocab_size + 2, generator=generator)
    logits[:, vocab_size:] = math.inf  # between the rows, read by nobody
    keys = torch.from_numpy(noise_keys([(seed, position) for position in range(len(rows))]))
    assert_same_tokens(logits[:, :vocab_size], torch.tensor(rows, dtype=torch.float64), keys)


def assert_same_tokens(logits: torch.Tensor, settings_: torch.Tensor, keys: torch.Tensor) -> None:
    """The settings stay in the CPU's memory."""
    from ostinato.ops.reference import sample
    from ostinato.ops.triton.sample import sample as kernel

    own = kernel(logits.to(DEVICE), settings_, keys)
    assert own.tolist() == sample.sample(logits, settings_, keys).tolist()
    assert own.dtype == torch.int32


@pytest.mark.parametrize("kept", [(0, 3, 1.0, 0.0), (0, 0, 0.5, 0.0), (0, 2, 0.6, 0.5)])
def test_all_that_tie_at_a_threshold_may_be_drawn(kept: tuple[float, ...]) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -math.inf, 0.0]]).expand(6, 8)
    settings_ = torch.tensor([(1.5, *kept[1:])] * 6, dtype=torch.float64)
    assert_same_tokens(logits, settings_, torch.from_numpy(noise_keys([(5, position) for position in range(6)])))


@settings(max_examples=6)
@given(rows=st.integers(0, 3), vocab_size=st.sampled_from([1, 5, 1024, 1030]), levels=st.integers(1, 3))
def test_the_best_token_is_the_lowest_of_equals(rows: int, vocab_size: int, levels: int) -> None:
    logits = torch.randint(levels, (rows, vocab_size), generator=torch.Generator().manual_seed(rows)).float()
    check("sample", logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_best_logit_gets_no_token_and_disturbs_no_other(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 7] = bad
    settings_ = torch.tensor([(temperature, 5, 0.9, 0.01)] * 3, dtype=torch.float64)
    keys = torch.from_numpy(noise_keys([(1, position) for position in range(3)]))
    assert_same_tokens(logits, settings_, keys)
    own, _, _, _ = run_both("sample", logits)
    assert own[1] == -1
    assert (own[[0, 2]] >= 0).all()
