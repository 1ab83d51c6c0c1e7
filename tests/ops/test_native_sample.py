"""The native kernel `sample`: the tokens of the reference, whatever the sizes and strides and however many threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.arrays import noise_keys
from ostinato.ops.reference import sample
from tests.support.examples import examples
from tests.support.native_sets import SETS, native_kernel, threads

pytestmark = pytest.mark.parametrize("isa", SETS)

# Around whole vectors and whole blocks of 256 logits.
VOCABS = st.sampled_from([1, 2, 7, 15, 16, 17, 33, 255, 256, 257, 511, 513, 1000, 2049, 9001])


def native(isa: str, *args: torch.Tensor) -> list[int]:
    """The tokens, which one thread and two must agree on."""
    kernel = native_kernel(isa, "sample")
    tokens = []
    for count in (1, 2):
        with threads(count):
            tokens.append(kernel(*args).tolist())
    assert tokens[0] == tokens[1]
    return tokens[0]


def random_logits(rows: int, vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def same_settings(rows: int, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> torch.Tensor:
    return torch.tensor([[temperature, top_k, top_p, min_p]] * rows, dtype=torch.float64)


def some_keys(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(noise_keys([(seed, position) for position in range(rows)]))


@examples(60)
@given(
    rows=st.integers(1, 5), vocab_size=VOCABS, gap=st.integers(0, 3), levels=st.integers(1, 4), seed=st.integers(0, 9)
)
def test_the_best_token_is_the_lowest_of_equals(
    isa: str, rows: int, vocab_size: int, gap: int, levels: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab_size + gap), generator=generator).float()
    logits[:, vocab_size:] = math.inf  # between the rows, read by nobody
    logits = logits[:, :vocab_size]
    assert native(isa, logits) == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [5, 40, 700])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_finite_best_logit_has_no_token(
    isa: str, bad: float, vocab_size: int, temperature: float
) -> None:
    logits = random_logits(4, vocab_size, 2.0)
    logits[0, -1] = logits[1, 0] = bad
    logits[2] = -math.inf
    tokens = native(isa, logits, same_settings(4, temperature), some_keys(4))
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0


@examples(150)
@given(
    rows=st.integers(1, 5),
    vocab_size=VOCABS,
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    rounded=st.booleans(),
    wanted=st.tuples(
        st.sampled_from([0.0, 1e-300, 0.3, 1.0, 1.7, 1e300]),
        st.sampled_from([0, 0, 1, 2, 7, 50, 300, 5000]),
        st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.9, 0.999]),
        st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    ),
    ruled_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_drawn_tokens_are_those_of_the_reference(
    isa: str,
    rows: int,
    vocab_size: int,
    scale: float,
    rounded: bool,
    wanted: tuple[float, int, float, float],
    ruled_out: bool,
    seed: int,
) -> None:
    """Rounded logits tie at every threshold; half of the tokens may be ruled out; the first row is drawn freely."""
    logits = random_logits(rows, vocab_size, scale, seed)
    logits = logits.round() if rounded else logits
    if ruled_out:
        logits[:, 1::2] = -math.inf
    asked = same_settings(rows, *wanted)
    asked[0] = torch.tensor([1.0, 0, 1, 0])
    expected = sample.sample(logits, asked, some_keys(rows, seed))
    assert native(isa, logits, asked, some_keys(rows, seed)) == expected.tolist()


def test_every_kept_token_can_be_drawn_and_no_other(isa: str) -> None:
    draws = 4000
    logits = random_logits(1, 600, 1.5)
    for top_k, top_p, min_p in ((9, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.2), (30, 0.4, 0.02)):
        asked = same_settings(draws, 1.3, top_k, top_p, min_p)
        kept = np.flatnonzero(np.isfinite(sample.restrict(logits.numpy(), asked[:1].numpy())[0])).tolist()
        drawn = native(isa, logits.expand(draws, -1), asked, some_keys(draws))
        assert set(drawn) <= set(kept)
        assert len(set(drawn)) > 0.7 * len(kept)


def test_rows_behind_the_real_ones_are_left_alone(isa: str) -> None:
    logits = random_logits(3, 300, 1.0)
    logits[2] = math.nan
    out = torch.full((3,), 77, dtype=torch.int32)
    kernel = native_kernel(isa, "sample")
    kernel(logits[:2], out=out[:2])
    assert out.tolist() == [*logits[:2].argmax(-1).tolist(), 77]
    assert kernel(logits[:0]).tolist() == []
