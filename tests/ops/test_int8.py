"""8-bit weights: what rounding costs, and products and embeddings with them against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant import quantize
from ostinato.ops.reference import matmul, pointwise
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import INT8_SETS, PRODUCT_SETS, SETS, native_kernel

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


def test_a_token_is_rounded_to_nearest_with_ties_to_even_and_its_largest_is_127_scales() -> None:
    x = torch.tensor(
        [[254.0, 1.0, 3.0, -5.0], [0.0, 0.0, 0.0, 0.0], [2.0**-101, 0.0, 0.0, 0.0], [1.0, torch.inf, 0.0, 0.0]]
    )
    integers, scale = matmul.quantize_tokens(x)
    assert integers[:3].tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert scale[:3].tolist() == [2, 0, 0]
    assert scale[3].isnan()


odd_tokens = st.sampled_from(["plain", "zeros", "tiny", "huge", "one outlier", "nan", "inf"])


@pytest.mark.parametrize("isa", INT8_SETS)
@examples(100)
@given(
    st.lists(odd_tokens, max_size=40), sizes, sizes, st.sampled_from([None, "silu", "swiglu"]), st.booleans(), dtypes,
    seeds,
)  # fmt: skip
def test_products_of_8_bit_tokens_are_their_exact_sums_and_a_token_is_alone(
    isa: str,
    tokens: list[str],
    columns: int,
    rows: int,
    activation: str | None,
    added: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """With the bits of one token alone, a fixed order or not; NaN for a token with an element that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows + rows % 2
    x = torch.randn(len(tokens), columns, generator=generator)
    for token, kind in zip(x, tokens, strict=True):
        token *= {"zeros": 0.0, "tiny": 1e-6, "huge": 1e3}.get(kind, 1.0)
        if kind in ("one outlier", "nan", "inf"):
            token[seed % columns] = {"one outlier": 1e4, "nan": torch.nan, "inf": -torch.inf}[kind]
    x = spaced(x.to(dtype), 5)
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = (torch.rand(rows, generator=generator) + 0.5) / (128 * columns**0.5)
    bias = torch.randn(rows, generator=generator).to(dtype) if added else None
    outputs = rows // 2 if activation == "swiglu" else rows
    residual = torch.randn(len(tokens), outputs, generator=generator).to(dtype) if added else None
    factor = torch.rand(rows, generator=generator) + 0.5 if seed % 2 else None

    def arguments(part: slice) -> tuple[object, ...]:
        rest = None if residual is None else residual[part]
        return (x[part], weight, bias, rest, activation, factor, None, scale, None, None, None, True)

    out = checked_kernel(isa, "linear")(*arguments(slice(None)))
    integers, scales = matmul.quantize_tokens(x)
    sums = (integers.double() @ weight.double().T) * scales.double()[:, None] * scale.double()
    y = (sums + (0 if bias is None else bias.double())) * (1 if factor is None else factor.double())
    if activation == "silu":
        y = y * y.sigmoid()
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = gate * gate.sigmoid() * up
    y = y + (0 if residual is None else residual.double())
    is_finite = torch.tensor([kind not in ("nan", "inf") for kind in tokens], dtype=torch.bool)
    assert out[~is_finite].isnan().all()
    limit = torch.finfo(dtype).max
    clear = is_finite[:, None] & (y.abs() < limit)
    largest = y.abs() + 1 + (0 if residual is None else residual.double().abs())
    assert ((out.double() - y).abs() <= 8 * rounding(dtype) * largest)[clear].all()
    assert same_bits(out, native_kernel(isa, "linear", deterministic=True)(*arguments(slice(None))))
    for t in range(0, len(tokens), 7):
        assert same_bits(out[t : t + 1], native_kernel(isa, "linear")(*arguments(slice(t, t + 1))))


@pytest.mark.parametrize("isa", INT8_SETS)
def test_the_reference_and_kernels_round_tokens_alike(isa: str) -> None:
    """Identity matrices show the integers."""
    x = torch.randn(50, 130, generator=torch.Generator().manual_seed(3))
    eye, ones = torch.eye(130).to(torch.int8), torch.ones(130)
    given = (x, eye, None, None, None, None, None, ones, None, None, None, True)
    assert torch.equal(native_kernel(isa, "linear")(*given), matmul.linear(*given))


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
