"""The native kernel that quantises weights against its definition, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.dispatch import load_extension
from ostinato.ops.quant import quantize
from tests.support.examples import examples
from tests.support.native_kernels import same_bits, spaced
from tests.support.native_sets import SETS, threads

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(60)
seeds = st.integers(0, 2**31)
sizes = st.sampled_from([1, 5, 16, 32, 37, 64, 100, 128, 160, 300])
group_sizes = st.sampled_from([None, 32, 128])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def quantized(
    isa: str, values: torch.Tensor, group_size: int | None, gap: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, of `values` that are part of something wider; what is not written shows."""
    rows, columns = values.shape
    groups = () if group_size is None else (quantize.num_groups(columns, group_size),)
    weight, scale = torch.full((rows, columns), -128, dtype=torch.int8), torch.full((rows, *groups), -1.0)
    quantize.native_quantize_int8(load_extension(isa))(spaced(values, gap), weight, scale, group_size)
    return weight, scale


@few
@given(st.integers(1, 20), sizes, group_sizes, st.sampled_from([1e-6, 1.0, 1e4]), dtypes, seeds)
def test_a_kernel_quantises_as_the_definition_does(
    isa: str, rows: int, columns: int, group_size: int | None, size: float, dtype: torch.dtype, seed: int
) -> None:
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    values[0] = 0
    weight, scale = quantized(isa, values, group_size)
    expected = quantize.quantize_int8(values, group_size)
    assert same_bits(weight, expected[0])
    assert same_bits(scale, expected[1])


def test_halves_are_rounded_to_the_even_neighbour(isa: str) -> None:
    values = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    weight, scale = quantized(isa, values, None)
    assert scale.tolist() == [1.0]
    assert weight.tolist() == [[127, 0, 2, 2, 0, -2, -126]]


def test_values_that_are_not_finite_stay_so(isa: str) -> None:
    values = torch.randn(3, 40)
    values[0, 39], values[1, 2] = float("nan"), float("-inf")
    back = quantize.dequantize(*quantized(isa, values, None), None)
    assert back.isfinite().all(dim=1).tolist() == [False, False, True]


def test_any_number_of_threads_gives_the_same_bits(isa: str) -> None:
    values = torch.randn(37, 300, generator=torch.Generator().manual_seed(0))
    with threads(1):
        alone = quantized(isa, values, 128)
    with threads(5):
        together = quantized(isa, values, 128)
    assert same_bits(alone[0], together[0])
    assert same_bits(alone[1], together[1])
