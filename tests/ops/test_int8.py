"""8-bit weights: what rounding costs, and products and embeddings with them against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant import quantize
from ostinato.ops.reference import matmul, pointwise
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, rounding, spaced
from tests.support.native_sets import PRODUCT_SETS, SETS

few = examples(60)
seeds = st.integers(0, 2**31)
sizes = st.sampled_from([1, 5, 16, 32, 37, 64, 100, 128, 160, 300])
group_sizes = st.sampled_from([None, 32, 128])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def expanded(weight: torch.Tensor, scale: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """float64, element by element of its definition."""
    columns = torch.arange(weight.shape[1])
    scales = scale.double().view(len(weight), -1)
    return weight.double() * scales[:, columns // (group_size or weight.shape[1])]


@few
@given(st.integers(1, 20), sizes, group_sizes, st.sampled_from([1e-6, 1.0, 1e4]), dtypes, seeds)
def test_an_element_is_off_by_half_a_scale_at_most(
    rows: int, columns: int, group_size: int | None, size: float, dtype: torch.dtype, seed: int
) -> None:
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    values[0] = 0
    weight, scale = quantize.quantize_int8(values, group_size)
    assert weight.dtype is torch.int8
    assert weight.abs().max() <= 127
    assert scale.shape == ((rows,) if group_size is None else (rows, -(-columns // group_size)))
    back = expanded(weight, scale, group_size)
    half = expanded(torch.ones_like(weight), scale, group_size) / 2
    assert ((back - values.double()).abs() <= half * 1.0001).all()
    assert torch.equal(back[0], torch.zeros(columns, dtype=torch.float64))
    torch.testing.assert_close(quantize.dequantize(weight, scale, group_size).double(), back, rtol=1e-7, atol=0)


def test_the_largest_of_a_row_or_group_is_127_scales() -> None:
    values = torch.tensor([[1.0, -4.0, 2.0, 0.5], [0.0, 0.0, 8.0, 1.0]])
    weight, scale = quantize.quantize_int8(values, None)
    assert weight.tolist() == [[32, -127, 64, 16], [0, 0, 127, 16]]
    torch.testing.assert_close(scale, torch.tensor([4 / 127, 8 / 127]))
    weight, scale = quantize.quantize_int8(values, 2)
    assert weight.tolist() == [[32, -127, 127, 32], [0, 0, 127, 16]]
    torch.testing.assert_close(scale, torch.tensor([[4 / 127, 2 / 127], [0, 8 / 127]]))


def test_values_that_are_not_finite_stay_so() -> None:
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]])
    assert not quantize.dequantize(*quantize.quantize_int8(values, None), None).isfinite().all(dim=1).any()


def quantized(rows: int, columns: int, group_size: int | None, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return quantize.quantize_int8(torch.randn(rows, columns, generator=generator) * columns**-0.5, group_size)


@few
@given(st.integers(0, 20), sizes, sizes, group_sizes, st.booleans(), dtypes, seeds)
def test_a_product_with_8_bit_weights_is_as_exact_as_its_input(
    tokens: int, columns: int, rows: int, group_size: int | None, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    check_product(matmul.linear, tokens, columns, rows, group_size, bias, None, dtype, seed)


@pytest.mark.parametrize("isa", PRODUCT_SETS)
@examples(150)
@given(
    st.integers(0, 40), sizes, sizes, group_sizes, st.booleans(), st.sampled_from([None, "silu", "swiglu"]), dtypes,
    seeds,
)  # fmt: skip
def test_the_native_product_with_8_bit_weights_agrees(
    isa: str,
    tokens: int,
    columns: int,
    rows: int,
    group_size: int | None,
    bias: bool,
    activation: str | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    check_product(checked_kernel(isa, "linear"), tokens, columns, rows, group_size, bias, activation, dtype, seed)


def check_product(kernel, tokens, columns, rows, group_size, bias, activation, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = rows + rows % 2 if activation == "swiglu" else rows
    x = spaced(torch.randn(tokens, columns, generator=generator).to(dtype), 5)
    weight, scale = quantized(rows, columns, group_size, generator)
    added = torch.randn(rows, generator=generator).to(dtype) if bias else None
    factor = torch.rand(rows, generator=generator) + 0.5
    out = kernel(x, weight, added, None, activation, factor, None, scale, group_size)
    y = x.double() @ expanded(weight, scale, group_size).T
    largest = x.double().abs() @ expanded(weight, scale, group_size).abs().T + 1
    y = (y + (0 if added is None else added.double())) * factor.double()
    if activation == "silu":
        y = y * y.sigmoid()
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = gate * gate.sigmoid() * up
        largest = largest.chunk(2, dim=-1)[0] * largest.chunk(2, dim=-1)[1]
    assert out.dtype is dtype
    assert ((out.double() - y).abs() <= 4 * rounding(dtype) * (largest + y.abs())).all()


@few
@given(st.integers(0, 9), sizes, group_sizes, st.sampled_from([1.0, 0.3]), dtypes, seeds)
def test_an_embedding_of_8_bits_gives_the_rows_that_it_stands_for(
    tokens: int, hidden: int, group_size: int | None, multiplier: float, dtype: torch.dtype, seed: int
) -> None:
    check_embedding(pointwise.embedding, tokens, hidden, group_size, multiplier, dtype, seed)


@pytest.mark.parametrize("isa", SETS)
@few
@given(
    st.integers(0, 9), st.sampled_from([1, 37, 64, 512, 700]), group_sizes, st.sampled_from([1.0, 0.3]), dtypes, seeds
)
def test_the_native_embedding_of_8_bits_agrees(
    isa: str, tokens: int, hidden: int, group_size: int | None, multiplier: float, dtype: torch.dtype, seed: int
) -> None:
    check_embedding(checked_kernel(isa, "embedding"), tokens, hidden, group_size, multiplier, dtype, seed)


def check_embedding(kernel, tokens, hidden, group_size, multiplier, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, scale = quantized(11, hidden, group_size, generator)
    ids = torch.randint(11, (tokens,), generator=generator)
    out = kernel(ids, weight, multiplier, scale, group_size, dtype)
    assert out.dtype is dtype
    expected = expanded(weight, scale, group_size)[ids] * multiplier
    torch.testing.assert_close(out.double(), expected, rtol=2 * rounding(dtype), atol=1e-7)
