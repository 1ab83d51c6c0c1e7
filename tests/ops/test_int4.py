"""4-bit weights made of others: by torch, and by the native kernel that makes them while a model is loaded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops import int4
from ostinato.ops.int8 import num_groups
from ostinato.ops.kernels import load_extension
from tests.support.native_kernels import same_bits, spaced
from tests.support.native_sets import SETS, threads

few = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 20), st.sampled_from([1, 5, 16, 32, 37, 64, 100, 128, 160, 300]))
group_sizes = st.sampled_from([32, 64, 128])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def random(shape: tuple[int, int], seed: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some rows of one sign, of zeros, and with a value far beyond the others."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    values[1::4] = values[1::4].abs()
    values[2::4, ::7] *= 20
    values[3::8] = 0
    return values.to(dtype)


def errors(values: torch.Tensor, made: int4.Integers, group_size: int) -> torch.Tensor:
    """Squared, of each group, float64."""
    apart = (int4.dequantize(*made, group_size).double() - values.double()) ** 2
    missing = num_groups(values.shape[1], group_size) * group_size - values.shape[1]
    return torch.nn.functional.pad(apart, (0, missing)).unflatten(1, (-1, group_size)).sum(-1)


def to_the_nearest(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Squared errors, float64, where the range of each group is cut into 15 equal steps."""
    missing = num_groups(values.shape[1], group_size) * group_size - values.shape[1]
    groups = torch.nn.functional.pad(values.double(), (0, missing)).unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).clamp(min=1e-30)
    zero = (-low / step).round()
    whole = ((groups / step).round() + zero).clamp(0, 15) - zero
    return ((whole * step - groups) ** 2).sum(-1)


@few
@given(shapes, group_sizes, st.sampled_from([1e-2, 1.0, 1e3]), dtypes, seeds)
def test_the_scale_that_is_found_is_no_worse_than_that_of_the_range(
    shape: tuple[int, int], group_size: int, size: float, dtype: torch.dtype, seed: int
) -> None:
    values = random(shape, seed, size, dtype)
    whole, scale, zero = made = int4.quantize(values, group_size)
    assert (whole.dtype, scale.dtype, zero.dtype) == (torch.int8, torch.float32, torch.int8)
    assert whole.shape == values.shape
    assert 0 <= whole.min() <= whole.max() <= 15
    assert 0 <= zero.min() <= zero.max() <= 15
    # A scale is rounded to 16 bits, by at most 2^-11.
    rounding = (values.double().abs().amax() * 2**-10) ** 2 * group_size
    assert (errors(values, made, group_size) <= to_the_nearest(values, group_size) * 1.01 + rounding).all()


def test_the_search_takes_a_tenth_off_the_error_of_normal_weights() -> None:
    values = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    found = errors(values, int4.quantize(values, 128), 128).sum()
    assert found < 0.92 * to_the_nearest(values, 128).sum()


def test_a_group_with_a_value_that_is_not_finite_stays_so() -> None:
    values = torch.randn(4, 64)
    values[0, 3], values[1, 40], values[2, 0] = float("nan"), float("inf"), float("-inf")
    back = int4.dequantize(*int4.quantize(values, 32), 32).isfinite().unflatten(1, (2, 32)).all(-1)
    assert back.tolist() == [[False, True], [True, False], [False, True], [True, True]]


def test_slabs_give_what_the_whole_gives() -> None:
    values = random((3, 2**17), seed=1)
    for slab, whole in zip(int4.quantize_in_slabs(values, 128), int4.quantize(values, 128), strict=True):
        assert torch.equal(slab, whole)


@pytest.mark.parametrize("isa", SETS)
class TestNative:
    @few
    @given(shapes, group_sizes, st.sampled_from([1e-2, 1.0, 1e3]), dtypes, seeds)
    def test_a_kernel_finds_what_the_definition_finds(
        self, isa: str, shape: tuple[int, int], group_size: int, size: float, dtype: torch.dtype, seed: int
    ) -> None:
        """Sums are added in another order, so that of two equally good scales either may be taken."""
        values = random(shape, seed, size, dtype)
        whole, scale, zero = made = int4.native_quantize(load_extension(isa))(spaced(values, 3), group_size)
        expected = int4.quantize(values, group_size)
        assert same_bits(zero, expected[2])
        assert 0 <= whole.min() <= whole.max() <= 15
        assert torch.equal(scale, scale.half().float())
        tolerance = (values.double().abs().amax() * 2**-10) ** 2 * group_size
        apart = errors(values, made, group_size) - errors(values, expected, group_size)
        assert (apart <= 0.01 * errors(values, expected, group_size) + tolerance).all()

    def test_a_group_with_a_value_that_is_not_finite_stays_so(self, isa: str) -> None:
        values = torch.randn(4, 64)
        values[0, 3], values[1, 40], values[2, 0] = float("nan"), float("inf"), float("-inf")
        made = int4.native_quantize(load_extension(isa))(values, 32)
        back = int4.dequantize(*made, 32).isfinite().unflatten(1, (2, 32)).all(-1)
        assert back.tolist() == [[False, True], [True, False], [False, True], [True, True]]

    def test_any_number_of_threads_gives_the_same_bits(self, isa: str) -> None:
        values = random((37, 300), seed=0)
        quantize = int4.native_quantize(load_extension(isa))
        with threads(1):
            alone = quantize(values, 128)
        with threads(5):
            together = quantize(values, 128)
        assert all(same_bits(*pair) for pair in zip(alone, together, strict=True))
