"""Triton's rotation, its angles and the write of keys and values, against the references."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.triton_kernels import DTYPES, assert_close, check, require_triton, run_both

require_triton()

dtypes = st.sampled_from(DTYPES)
tokens = st.integers(0, 3)


@settings(max_examples=15)
@given(
    dtype=dtypes,
    tokens=tokens,
    heads=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([None, 4, 6, 8]),
    multiplier=st.sampled_from([1.0, 0.25]),
    has_values=st.booleans(),
)
def test_rotary_rotates_and_writes_each_token_into_its_cell_and_nothing_else(
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    half: int | None,
    multiplier: float,
    has_values: bool,
) -> None:
    torch.manual_seed(heads)
    parts = torch.randn(tokens, heads + 2 * kv_heads, 16).to(dtype).split((heads, kv_heads, kv_heads), dim=1)
    angles = None if half is None else torch.randn(2, tokens, half)
    caches = torch.full((2, 3, 16, kv_heads, 16), torch.nan, dtype=dtype)
    cells = torch.randperm(32)[:tokens] + 16
    q, k, v = parts
    check(
        "rotary",
        q,
        k,
        v if has_values else None,
        angles,
        multiplier,
        caches[0],
        caches[1] if has_values else None,
        cells,
    )


@settings(max_examples=12)
@given(
    dtype=dtypes,
    tokens=st.integers(1, 3),
    heads=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([None, 6, 8]),
    has_values=st.booleans(),
)
def test_keys_and_values_with_scales_are_rounded(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, half: int | None, has_values: bool
) -> None:
    """To the definition's scales, and to its integers but for those whose value lies between two of them."""
    torch.manual_seed(heads)
    parts = torch.randn(tokens, heads + 2 * kv_heads, 16).to(dtype).split((heads, kv_heads, kv_heads), dim=1)
    parts[1][0, 0] = 0
    angles = None if half is None else torch.randn(2, tokens, half)
    shape, cells = (3, 16, kv_heads, 16), torch.randperm(32)[:tokens] + 16
    caches, scales = torch.full((2, *shape), 113, dtype=torch.int8), torch.full((2, *shape[:3]), torch.nan)
    q, k, v = parts
    kept = (caches[0], caches[1] if has_values else None, cells, scales[0], scales[1] if has_values else None)
    result, right, given, expected = run_both("rotary", q, k, v if has_values else None, angles, 1.0, *kept)
    assert_close(result, right)
    for own, other in zip(given, expected, strict=True):
        if own.dtype == torch.int8:
            assert int((own.int() - other.int()).abs().max()) <= 1
            assert int((own != other).sum()) <= 2
        else:
            assert_close(own, other)


def test_without_angles_the_queries_are_the_result_itself() -> None:
    q = torch.randn(2, 2, 16)
    kv = torch.randn(2, 2, 1, 16)
    caches = torch.zeros(2, 2, 16, 1, 16)
    result, _, given, _ = run_both("rotary", q, *kv, None, 1.0, *caches, torch.tensor([16, 17]))
    assert result is given[0]


def test_padding_goes_to_the_null_block_and_no_token_is_disturbed() -> None:
    q, kv = torch.randn(4, 2, 16), torch.randn(2, 4, 1, 16)
    kv[:, 2:] = torch.nan
    caches = torch.full((2, 2, 16, 1, 16), torch.nan)
    result, right, given, expected = run_both(
        "rotary", q, *kv, torch.randn(2, 4, 8), 1.0, *caches, torch.tensor([20, 31, 0, 0])
    )
    assert_close(result, right)
    for own, other in zip(given[4:6], expected[4:6], strict=True):
        assert_close(own[1:], other[1:])


@settings(max_examples=8)
@given(dtype=dtypes, tokens=tokens, heads=st.integers(1, 5), half=st.sampled_from([3, 8]))
def test_rotate(dtype: torch.dtype, tokens: int, heads: int, half: int) -> None:
    wide = torch.randn(tokens, heads + 2, 16).to(dtype)
    check("rotate", wide[:, :heads], torch.randn(2, tokens, half))


@settings(max_examples=10)
@given(positions=st.lists(st.integers(0, 2**20), max_size=4), half=st.sampled_from([1, 20]), scaling=st.just(1.25))
def test_angles_are_right_at_any_position(positions: list[int], half: int, scaling: float) -> None:
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    check("rotary_angles", torch.tensor(positions, dtype=torch.int64), frequencies, scaling)
    by_axis = torch.tensor(positions, dtype=torch.int64).view(-1, 1) + torch.arange(3)
    check("axial_angles", by_axis, torch.arange(half) % 3, frequencies, scaling)


@settings(max_examples=6)
@given(dtype=dtypes, tokens=tokens, count=st.integers(1, 4))
def test_weighted_embedding(dtype: torch.dtype, tokens: int, count: int) -> None:
    ids = torch.randint(7, (tokens, count))
    check("weighted_embedding", ids, torch.rand(tokens, count), torch.randn(7, 20).to(dtype))
