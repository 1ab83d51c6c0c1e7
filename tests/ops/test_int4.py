"""4-bit weights made of others: by torch, and by the native kernel that makes them while a model is loaded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.dispatch import load_extension
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.dequantize import dequantize
from ostinato.ops.quant.quantize import WeightQuantizers, native_quantizers
from tests.support.examples import examples
from tests.support.native_kernels import same_bits, spaced
from tests.support.native_sets import SETS, threads

few = examples(60)
seeds = st.integers(0, 2**31)
counts = st.tuples(st.integers(1, 20), st.integers(1, 4))
group_sizes = st.sampled_from([32, 64, 128])
magnitudes = st.sampled_from([1e-6, 1.0, 1e3])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def random(shape: tuple[int, int], seed: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some rows of one sign, of zeros, and with a value far beyond the others; all finite in `dtype`."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    values[1::4] = values[1::4].abs()
    values[2::4, ::7] *= 20
    values[3::8] = 0
    largest = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-largest, largest).to(dtype)


def made(quantize: quantize.QuantizeInt4, values: torch.Tensor, group_size: int) -> torch.Tensor:
    """The blocks."""
    kind = BLOCK_FORMATS[f"int4_g{group_size}"]
    weight = torch.full((len(values), kind.row_bytes(values.shape[1])), 255, dtype=torch.uint8)
    quantize(values, weight, group_size)
    return weight


def meant(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return dequantize(f"int4_g{group_size}", weight)


def errors(values: torch.Tensor, weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Squared, of each group, float64."""
    return ((meant(weight, group_size).double() - values.double()) ** 2).unflatten(1, (-1, group_size)).sum(-1)


def to_the_nearest(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Squared errors, float64, where the range of each group is cut into 15 equal steps."""
    groups = values.double().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).clamp(min=1e-30)
    zero = (-low / step).round()
    whole = ((groups / step).round() + zero).clamp(0, 15) - zero
    return ((whole * step - groups) ** 2).sum(-1)


@few
@given(counts, group_sizes, magnitudes, dtypes, seeds)
def test_the_scale_that_is_found_is_no_worse_than_that_of_the_range(
    count: tuple[int, int], group_size: int, size: float, dtype: torch.dtype, seed: int
) -> None:
    values = random((count[0], count[1] * group_size), seed, size, dtype)
    weight = made(quantize.quantize_int4_into, values, group_size)
    # Its bits make a scale wrong by at most 2^-16.
    rounding = (values.double().abs().amax() * 2**-16) ** 2 * group_size
    assert (errors(values, weight, group_size) <= to_the_nearest(values, group_size) * 1.001 + rounding).all()


def test_the_search_takes_a_tenth_off_the_error_of_normal_weights() -> None:
    values = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    found = errors(values, made(quantize.quantize_int4_into, values, 128), 128).sum()
    assert found < 0.91 * to_the_nearest(values, 128).sum()


def test_slabs_give_what_the_whole_gives() -> None:
    values = random((3, 2**17), seed=1)
    whole, scale, zero = quantize.quantize_int4(values, 128)
    expected = scale.repeat_interleave(128, 1) * (whole.int() - zero.int().repeat_interleave(128, 1))
    assert torch.equal(meant(made(quantize.quantize_int4_into, values, 128), 128), expected)


def a_few_not_finite() -> torch.Tensor:
    values = torch.randn(4, 64)
    values[0, 3], values[1, 40], values[2, 0] = float("nan"), float("inf"), float("-inf")
    return values


STAYS_FINITE = [[False, True], [True, False], [False, True], [True, True]]


def test_a_group_with_a_value_that_is_not_finite_stays_so() -> None:
    back = meant(made(quantize.quantize_int4_into, a_few_not_finite(), 32), 32)
    assert back.isfinite().unflatten(1, (2, 32)).all(-1).tolist() == STAYS_FINITE


@pytest.mark.parametrize("isa", SETS)
class TestNative:
    @few
    @given(counts, group_sizes, magnitudes, dtypes, seeds)
    def test_a_kernel_finds_what_the_definition_finds(
        self, isa: str, count: tuple[int, int], group_size: int, size: float, dtype: torch.dtype, seed: int
    ) -> None:
        """Sums are added in another order, so that of two equally good scales either may be taken, and what follows
        from it may be a little better or worse."""
        values = random((count[0], count[1] * group_size), seed, size, dtype)
        weight = made(quantize.native_quantize_int4(load_extension(isa)), spaced(values, 3), group_size)
        expected = errors(values, made(quantize.quantize_int4_into, values, group_size), group_size)
        found = errors(values, weight, group_size)
        rounding = (values.double().abs().amax() * 2**-16) ** 2 * group_size
        assert (found <= 1.03 * expected + rounding).all()
        assert (found > 1.001 * expected + rounding).sum() <= 1 + found.numel() // 20

    def test_a_group_with_a_value_that_is_not_finite_stays_so(self, isa: str) -> None:
        back = meant(made(quantize.native_quantize_int4(load_extension(isa)), a_few_not_finite(), 32), 32)
        assert back.isfinite().unflatten(1, (2, 32)).all(-1).tolist() == STAYS_FINITE

    def test_any_number_of_threads_gives_the_same_bits(self, isa: str) -> None:
        values = random((37, 384), seed=0)
        kernel = quantize.native_quantize_int4(load_extension(isa))
        with threads(1):
            alone = made(kernel, values, 128)
        with threads(5):
            together = made(kernel, values, 128)
        assert same_bits(alone, together)


@pytest.mark.parametrize("isa", [None, *SETS])
def test_blocks_of_8_bits_are_wrong_by_half_a_step_at_most(isa: str | None) -> None:
    values = random((20, 96), seed=5)
    quantizers = WeightQuantizers() if isa is None else native_quantizers(load_extension(isa))
    weight = torch.full((20, BLOCK_FORMATS["Q8_0"].row_bytes(96)), 255, dtype=torch.uint8)
    quantizers.quantize_blocks(values, weight, "Q8_0")
    groups = values.unflatten(1, (-1, 32))
    # A scale of 16 bits is wrong by 2^-11 of itself, 127 times.
    step = groups.abs().amax(-1, keepdim=True) / 127
    assert ((dequantize("Q8_0", weight).unflatten(1, (-1, 32)) - groups).abs() <= step * (0.501 + 127 / 2**11)).all()
