"""The native embedding, rotary angles and rotary, against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant.quantize import quantize_int8
from ostinato.ops.reference import pointwise, rotary
from tests.support.native_sets import SETS, native_kernel, record, threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

pytestmark = pytest.mark.parametrize("isa", SETS)


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@given(
    tokens=st.integers(0, 9),
    hidden=st.sampled_from((1, 5, 16, 96, 700, 1030)),
    multiplier=st.sampled_from((1.0, 12.0, 0.3)),
    dtype=st.sampled_from(DTYPES),
)
def test_an_embedding_is_the_reference_to_the_bit(
    isa: str, tokens: int, hidden: int, multiplier: float, dtype: torch.dtype
) -> None:
    weight = _normal(11, 2 * hidden, dtype=dtype)[:, :hidden]
    ids = torch.arange(tokens) * 7 % 11
    expected = pointwise.embedding(ids, weight, multiplier)
    for count in (1, 2):
        with threads(count):
            result = native_kernel(isa, "embedding")(ids, weight, multiplier)
            wide = native_kernel(isa, "embedding")(ids, weight, multiplier, out_dtype=torch.float32)
        assert result.dtype == dtype
        assert torch.equal(result, expected)
        assert torch.equal(wide, pointwise.embedding(ids, weight, multiplier, out_dtype=torch.float32))


def test_angles_are_right_up_to_a_position_of_a_million(isa: str) -> None:
    frequencies = torch.tensor([1.0, 0.37, 0.01, 1e-4, 3e-7])
    positions = torch.tensor([0, 1, 17, 4095, 131071, 999_983, 1_000_000])
    result = native_kernel(isa, "rotary_angles")(positions, frequencies, 1.25)
    angles = (positions.float()[:, None] * frequencies).double()
    expected = 1.25 * torch.stack((angles.cos(), angles.sin()))
    assert result.shape == (2, 7, 5)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=2e-7)


class Case:
    """q, k and v as parts of one projection, so strided by token, and a cache full of NaN."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype) -> None:
        packed = _normal(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
        self.q, self.k, self.v = packed.split((heads, kv_heads, kv_heads), dim=1)
        self.angles = rotary.rotary_angles(torch.arange(tokens) * 3 + 5, torch.logspace(0, -3, half), 0.9)
        self.k_cache = torch.full((tokens // 4 + 2, 4, kv_heads, head_dim), torch.nan, dtype=dtype)
        self.v_cache = self.k_cache.clone()
        self.kv_cells = torch.randperm(4 * (tokens // 4 + 1), generator=torch.Generator().manual_seed(1))[:tokens] + 4

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Each pair of elements as a complex number times that of its angle."""
        half = self.angles.shape[2]
        x, (cos, sin) = x.double(), self.angles.double().unsqueeze(2)
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
        return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


@given(
    tokens=st.integers(0, 9),
    heads=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from((1, 3, 8, 16, 20, 32, 64)),
    beyond=st.sampled_from((0, 1, 6, 32)),
    multiplier=st.sampled_from((1.0, 0.39)),
    dtype=st.sampled_from(DTYPES),
)
def test_rotary_rotates_queries_and_stores_keys_and_values(
    isa: str, tokens: int, heads: int, kv_heads: int, half: int, beyond: int, multiplier: float, dtype: torch.dtype
) -> None:
    case = Case(tokens, heads, kv_heads, 2 * half + beyond, half, dtype)
    results = []
    for count in (1, 2):
        k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
        with threads(count):
            q = native_kernel(isa, "rotary")(
                case.q, case.k, case.v, case.angles, multiplier, k_cache, v_cache, case.kv_cells
            )
        results.append((q, k_cache, v_cache))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7), two.nan_to_num(7))
    q, k_cache, v_cache = results[0]
    assert q.dtype == dtype
    scaled = case.k if multiplier == 1.0 else case.k * multiplier  # in the dtype: that rounding is the definition's too
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(q.double(), case.rotated(case.q), **tolerance)
    torch.testing.assert_close(k_cache.flatten(0, 1)[case.kv_cells].double(), case.rotated(scaled), **tolerance)
    assert torch.equal(v_cache.flatten(0, 1)[case.kv_cells], case.v)
    for cache in (k_cache, v_cache):
        assert int(cache.isnan().all(dim=(2, 3)).sum()) == cache.shape[0] * 4 - tokens


@pytest.mark.parametrize("multiplier", [1.0, 0.39])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_angles_keys_and_values_are_stored_as_they_are(isa: str, multiplier: float, dtype: torch.dtype) -> None:
    case = Case(5, 4, 2, 24, 1, dtype)
    kernel = native_kernel(isa, "rotary")
    q = kernel(case.q, case.k, case.v, None, multiplier, case.k_cache, case.v_cache, case.kv_cells)
    assert q is case.q
    assert torch.equal(case.k_cache.flatten(0, 1)[case.kv_cells], case.k * multiplier)
    assert torch.equal(case.v_cache.flatten(0, 1)[case.kv_cells], case.v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_values_keys_alone_are_stored(isa: str, dtype: torch.dtype) -> None:
    """As where values are a part of keys."""
    case = Case(5, 4, 1, 26, 1, dtype)
    kernel = native_kernel(isa, "rotary")
    for count in (1, 2):
        cache = case.k_cache.clone()
        with threads(count):
            assert kernel(case.q, case.k, None, None, 1.0, cache, None, case.kv_cells) is case.q
        assert torch.equal(cache.flatten(0, 1)[case.kv_cells], case.k)
        assert int(cache.isnan().all(dim=(2, 3)).sum()) == cache.shape[0] * 4 - 5
    with pytest.raises(AssertionError, match="values have a cache of theirs"):
        kernel(case.q, case.k, case.v, None, 1.0, case.k_cache, None, case.kv_cells)


@given(
    tokens=st.integers(1, 9),
    heads=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from((0, 3, 16, 32)),
    beyond=st.sampled_from((0, 1, 32)),
    has_values=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_keys_and_values_with_scales_are_rounded_to_what_the_float_ones_give(
    isa: str, tokens: int, heads: int, kv_heads: int, half: int, beyond: int, has_values: bool, dtype: torch.dtype
) -> None:
    """The integers and scales are those that the definition gives of the keys that are stored without scales."""
    head_dim = 2 * half + max(beyond, 1)
    case = Case(tokens, heads, kv_heads, head_dim, max(half, 1), dtype)
    case.k[0, 0] = 0  # a head without a scale
    angles, v = case.angles if half else None, case.v if has_values else None
    kernel = native_kernel(isa, "rotary")
    plain = (case.k_cache.clone(), case.v_cache.clone() if has_values else None)
    q = kernel(case.q, case.k, v, angles, 1.0, *plain, case.kv_cells)
    shape = case.k_cache.shape
    for count in (1, 2):
        kept = [torch.full(shape, 113, dtype=torch.int8) for _ in plain]
        scales = [torch.full(shape[:3], torch.nan) for _ in plain]
        with threads(count):
            own = kernel(
                case.q, case.k, v, angles, 1.0, kept[0], kept[1] if has_values else None, case.kv_cells, *scales
            )
        assert torch.equal(own, q)
        for cache, integers, scale in zip(plain, kept, scales, strict=True):
            if cache is None:
                assert bool((integers == 113).all() and scale.isnan().all())
                continue
            expected = torch.full_like(integers.flatten(0, 1), 113)
            expected_scale = torch.full_like(scale.flatten(0, 1), torch.nan)
            rounded, of_heads = quantize_int8(cache.flatten(0, 1)[case.kv_cells].flatten(0, 1), None)
            expected[case.kv_cells] = rounded.view(tokens, kv_heads, head_dim)
            expected_scale[case.kv_cells] = of_heads.view(tokens, kv_heads)
            assert torch.equal(integers.flatten(0, 1), expected)
            assert torch.equal(scale.flatten(0, 1).nan_to_num(-1), expected_scale.nan_to_num(-1))


def test_a_replay_of_fewer_tokens_writes_nothing_for_the_others(isa: str) -> None:
    case = Case(6, 2, 1, 32, 16, torch.float32)
    kernel = native_kernel(isa, "rotary")
    args = (case.q, case.k, case.v, case.angles, 1.0)
    whole = kernel(*args, case.k_cache.clone(), case.v_cache.clone(), case.kv_cells)
    out = torch.full_like(whole, -1.0)
    record(isa, kernel, out, *args, case.k_cache, case.v_cache, case.kv_cells).run(4)
    assert torch.equal(out[:4], whole[:4])
    assert bool((out[4:] == -1.0).all())
    assert bool(case.k_cache.flatten(0, 1)[case.kv_cells[4:]].isnan().all())
    assert bool(case.v_cache.flatten(0, 1)[case.kv_cells[4:]].isnan().all())

    positions, frequencies = torch.arange(6) + 1000, torch.logspace(0, -3, 16)
    angles = native_kernel(isa, "rotary_angles")
    captured = torch.full((2, 6, 16), -2.0)
    record(isa, angles, captured, positions, frequencies, math.pi).run(4)
    assert torch.equal(captured[:, :4], angles(positions, frequencies, math.pi)[:, :4])
    assert bool((captured[:, 4:] == -2.0).all())
