"""The native linear against its definition in float64: few tokens, and many, which it computes another way."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.operations import GATED
from ostinato.ops.sizes import I16_SCALE_SPAN, I16_SCALE_SPAN_AVX512
from ostinato.ops.ukernels import ROWS
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, same_bits, spaced
from tests.support.native_sets import PRODUCT_SETS, features, first_m, has_driver, last_m, native_kernel, threads

pytestmark = pytest.mark.parametrize("isa", PRODUCT_SETS)

some = examples(60)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
token_counts = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 23, 24, 33, 40, 47, 48, 49, 61, 71, 72, 100, 130])
in_sizes = st.sampled_from([1, 2, 15, 31, 32, 33, 70, 127, 128, 256, 300, 515, 1030])
out_sizes = st.sampled_from([1, 3, 15, 16, 17, 33, 63, 64, 65, 130, 200])


def activated(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation == "relu2":
        return y.clamp(min=0).square()
    if activation == "silu":
        return y / (1 + torch.exp(-y))
    if activation == "gelu":
        return y * torch.special.erfc(-y / 2**0.5) / 2
    if activation == "gelu_pytorch_tanh":
        return y / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3)))
    if activation in ("swiglu", "geglu"):
        gates, values = y.chunk(2, dim=-1)
        return activated(gates, "silu" if activation == "swiglu" else "gelu_pytorch_tanh") * values
    return y


def lost_in_integers(isa: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | float:
    """What products of 16-bit integers may lose: of each element, 2^-15 of the largest of those that have one scale."""
    span = I16_SCALE_SPAN if has_driver(isa, "LARGE_M_I16_AVX2") else I16_SCALE_SPAN_AVX512
    rows = (row for row in ROWS if row.name in ("gemv_i16_s8_avx2", "gemv_i16_s8_vnni"))
    if x.dtype == torch.float32 or not any(row.runs_on(features(isa)) for row in rows):
        return 0.0
    parts = zip(x.double().abs().split(span, 1), weight.double().abs().split(span, 1), strict=True)
    return sum(part.amax(1, keepdim=True) * of.sum(1) for part, of in parts) / 2**15


def assert_near(out: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor | float) -> None:
    """Within the rounding of the result, and 1e-5 of the absolute `terms` that were added up for it."""
    rounding = 0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    allowed = rounding * expected.abs() + 1e-5 * (expected.abs() + terms) + 1e-7
    error = (out.double() - expected).abs()
    assert bool((error <= allowed).all()), f"an error of {(error / allowed).max():.2f} times what is allowed"


@some
@given(
    token_counts,
    in_sizes,
    out_sizes,
    dtypes,
    st.sampled_from([None, "relu2", "silu", "swiglu", "geglu", "gelu", "gelu_pytorch_tanh"]),
    st.integers(0, 15),
    seeds,
)
def test_outputs_are_products_with_all_that_follows(
    isa: str,
    tokens: int,
    in_size: int,
    out_size: int,
    dtype: torch.dtype,
    activation: str | None,
    parts: int,
    seed: int,
) -> None:
    """Each bit of `parts` is a part of the call that may be left out."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator)
    rows = 2 * out_size if activation in GATED else out_size
    x = spaced(randn(tokens, in_size).to(dtype), 3)
    weight = (randn(rows, in_size) / in_size**0.5).to(dtype)
    bias = randn(rows).to(dtype) if parts & 1 else None
    scale = torch.rand(rows, generator=generator) + 0.5 if parts & 2 else None
    out_dtype = torch.float32 if parts & 4 else None
    residual = spaced(randn(tokens, out_size).to(out_dtype or dtype), 5) if parts & 8 else None
    out = checked_kernel(isa, "linear")(x, weight, bias, residual, activation, scale, out_dtype)

    sums = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        sums, size = sums + bias.double(), size + bias.double().abs()
    if scale is not None:
        sums, size = sums * scale.double(), size * scale.double()
    expected = activated(sums, activation)
    # How much the activation makes of an error in its argument.
    terms: torch.Tensor = size
    if activation == "relu2":
        terms = 2 * size * sums.abs()
    elif activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        terms = 1.2 * size
    elif activation in GATED:
        (gates, values), (gate_size, value_size) = sums.chunk(2, dim=-1), size.chunk(2, dim=-1)
        terms = 1.2 * gate_size * values.abs() + gates.abs() * value_size
    if residual is not None:
        expected, terms = expected + residual.double(), terms + residual.double().abs()
    assert out.shape == expected.shape
    assert out.dtype == (out_dtype or dtype)
    assert_near(out, expected, terms)


@some
@given(
    token_counts,
    in_sizes,
    out_sizes,
    dtypes,
    st.sampled_from([0, 32, 64, 128]),
    st.sampled_from([None, "swiglu"]),
    st.booleans(),
    seeds,
)
def test_weights_of_8_bits_have_a_scale_per_output_or_per_group(
    isa: str,
    tokens: int,
    in_size: int,
    out_size: int,
    dtype: torch.dtype,
    group: int,
    activation: str | None,
    fixed_order: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * out_size if activation else out_size
    x = spaced(torch.randn(tokens, in_size, generator=generator).to(dtype), 3)
    weight = torch.randint(-128, 128, (rows, in_size), generator=generator, dtype=torch.int8)
    groups = -(-in_size // group) if group else 1
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / (64 * in_size**0.5)
    kernel = native_kernel(isa, "linear", deterministic=fixed_order)
    call = partial(
        kernel,
        x,
        weight,
        activation=activation,
        out_dtype=torch.float32,
        weight_scale=scales if group else scales.flatten(),
        group_size=group or None,
    )
    with threads(1):
        of_one = call()
    with threads(2):
        out = call()
    assert same_bits(of_one, out)
    dequantized = weight.double() * scales.double().repeat_interleave(group or in_size, dim=1)[:, :in_size]
    sums, size = x.double() @ dequantized.T, x.double().abs() @ dequantized.abs().T
    if not group and not fixed_order:
        size = size + 1e5 * lost_in_integers(isa, x, dequantized)
    if activation:
        (gates, values), (gate_size, value_size) = sums.chunk(2, dim=-1), size.chunk(2, dim=-1)
        size = 1.1 * gate_size * values.abs() + gates.abs() * value_size
    assert_near(out, activated(sums, activation), size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, last_m("gemv_i16_s8_avx2"), 33])
def test_numbers_beside_a_huge_one_lose_together_no_more_than_its_own_rounding_to_bfloat16(
    isa: str, tokens: int, dtype: torch.dtype
) -> None:
    """Where integers are multiplied: 2^-9 of it times the largest weight."""
    torch.manual_seed(0)
    weight, scale = torch.randint(-128, 128, (37, 520), dtype=torch.int8), torch.rand(37) / 128
    for size in (2.0**6, 2.0**9, 2.0**12):
        x = torch.randn(tokens, 520)
        x[:, 17::64] *= size
        x = x.to(dtype)
        out = native_kernel(isa, "linear")(x, weight, weight_scale=scale, out_dtype=torch.float32)
        w = weight.double() * scale.double()[:, None]
        parts = zip(x.double().abs().split(64, 1), w.abs().split(64, 1), strict=True)
        allowed = sum(part.amax(1, keepdim=True) * of.amax(1) for part, of in parts) / 2**9 + 1e-5
        assert bool(((out.double() - x.double() @ w.T).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, last_m("gemv_i16_s8_avx2"), 33])
def test_the_largest_numbers_times_the_largest_weights_fit_their_integers(
    isa: str, tokens: int, dtype: torch.dtype
) -> None:
    """All products have one sign, and the largest numbers below a power of two become the largest integers."""
    x = torch.full((tokens, 520), 2 - torch.finfo(dtype).eps, dtype=dtype)
    weight = torch.full((37, 520), -128, dtype=torch.int8)
    out = native_kernel(isa, "linear")(x, weight, weight_scale=torch.ones(37), out_dtype=torch.float32)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_size", "bits"), [(300, 0), (2050, 0), (256, 8)])
def test_in_a_fixed_order_the_bits_do_not_depend_on_the_number_of_tokens(
    isa: str, dtype: torch.dtype, in_size: int, bits: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(600, in_size).to(dtype)
    weight = torch.randn(70, in_size).to(dtype)
    kernel = native_kernel(isa, "linear", deterministic=True)
    call = partial(kernel, weight=weight, activation="silu")
    if bits == 8:
        int8 = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
        call = partial(kernel, weight=int8, weight_scale=torch.rand(70, 2), group_size=128)
    alone = torch.cat([call(x[i : i + 1]) for i in range(len(x))])
    for tokens in (2, 5, 6, 7, 13, 32, 48, 50, 111, 600):
        assert torch.equal(call(x[:tokens]), alone[:tokens])
        assert torch.equal(call(x[len(x) - tokens :]), alone[len(x) - tokens :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_size", "group"), [(300, None), (128, None), (2050, 0), (640, 160), (512, 32)])
def test_few_tokens_and_panels_of_many_each_add_in_one_order(
    isa: str, dtype: torch.dtype, in_size: int, group: int | None
) -> None:
    """`group` inputs of 8-bit weights have a scale; 0: a row has."""
    in_integers, suffix = group == 0 and dtype != torch.float32, "avx2"
    if in_integers and has_driver(isa, "LARGE_M_I16_VNNI"):
        suffix = "vnni"
    elif isa != "x86_64_v3":
        pytest.skip("other panels may add in another order")
    torch.manual_seed(0)
    x = torch.randn(60, in_size).to(dtype)
    weight = torch.randn(70, in_size).to(dtype)
    kernel = native_kernel(isa, "linear")
    call = partial(kernel, weight=weight, activation="swiglu")
    if group is not None:
        int8 = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
        scale = torch.rand(70, in_size // group) if group else torch.rand(70)
        call = partial(kernel, weight=int8, weight_scale=scale, group_size=group or None)
    # From 8 or 10 tokens on there are panels, by the length of a row; panels of integers, from one number on.
    least = first_m(f"gemv_i16_s8_{suffix}") if in_integers else 1
    few, many = (torch.cat([call(some) for some in x.split(size)]) for size in (least, 10))
    name = f"gemm_i16_s8_{suffix}" if in_integers else "gemm_f32_any_avx2"
    panels = [row.min_m for row in ROWS if row.name == name]
    last_few, first_many = min(panels) - 1, max(panels)
    for tokens in (*range(2, 15), 17, 24, 32, 40, 51, 60):
        orders = [few] if tokens <= last_few else [many] if tokens >= first_many else [few, many]
        given = [call(x[:tokens]), call(x[len(x) - tokens :])]
        wanted = [[order[:tokens], order[len(x) - tokens :]] for order in orders]
        assert any(all(map(torch.equal, given, each)) for each in wanted)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("tokens", [513, 1030])
def test_tokens_may_be_more_than_are_computed_at_a_time(isa: str, tokens: int, fixed_order: bool) -> None:
    torch.manual_seed(0)
    kernel = native_kernel(isa, "linear", deterministic=fixed_order)
    for dtype, in_size in [(torch.float32, 130), (torch.bfloat16, 131), (torch.float16, 64)]:
        x, weight = spaced(torch.randn(tokens, in_size).to(dtype), 2), torch.randn(20, in_size).to(dtype)
        out = kernel(x, weight, out_dtype=torch.float32)
        assert_near(out, x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T)
        int8, scales = torch.randint(-128, 128, weight.shape, dtype=torch.int8), torch.rand(20)
        out = kernel(x, int8, out_dtype=torch.float32, weight_scale=scales)
        dequantized = int8.double() * scales.double()[:, None]
        lost = 0.0 if fixed_order else lost_in_integers(isa, x, dequantized)
        assert_near(out, x.double() @ dequantized.T, x.double().abs() @ dequantized.abs().T + 1e5 * lost)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 32, 80])
@pytest.mark.parametrize("quantized", [False, True])
def test_nan_and_infinity_stay_with_their_token(isa: str, tokens: int, fixed_order: bool, quantized: bool) -> None:
    """Padding of a row, and of a block of tokens, is zero and reaches nothing."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 75).bfloat16(), torch.randn(37, 75).bfloat16()
    scale = None
    if quantized:
        weight, scale = torch.randint(1, 128, weight.shape, dtype=torch.int8), torch.rand(37)
    kernel = native_kernel(isa, "linear", deterministic=fixed_order)
    clean = kernel(x, weight, weight_scale=scale)
    bad = tokens // 2
    x[bad, 74] = torch.nan
    out = kernel(x, weight, weight_scale=scale)
    assert bool(out[bad].isnan().all())
    x[bad, 74] = torch.inf
    assert bool(kernel(x, weight, weight_scale=scale)[bad].isinf().all())
    others = torch.arange(tokens) != bad
    assert torch.equal(out[others], clean[others])


def test_every_integer_of_8_bits_is_multiplied_exactly(isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens in (1, 2, 6, 8, 40):
            x = torch.zeros(tokens, 256, dtype=dtype)
            x[:, 0] = 1
            weight = torch.arange(-128, 128, dtype=torch.int8).unsqueeze(1) * torch.ones(256, dtype=torch.int8)
            out = native_kernel(isa, "linear")(x, weight, weight_scale=torch.ones(256))
            assert torch.equal(out, torch.arange(-128, 128).to(dtype).expand(tokens, -1))
            assert torch.equal(
                native_kernel(isa, "linear")(x, weight.T.contiguous(), weight_scale=torch.ones(256)),
                torch.full_like(out, -128),
            )


def test_dtypes_that_the_kernel_does_not_know_are_refused(isa: str) -> None:
    kernel = native_kernel(isa, "linear")
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    narrow = weight.bfloat16()
    with pytest.raises(AssertionError, match="the result is in float32"):
        kernel(x, weight, out_dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"bfloat16 where float32 is read"):
        kernel(x, narrow)
    with pytest.raises(AssertionError, match="the residual has another dtype"):
        kernel(x, weight, residual=narrow[:2, :3])
    with pytest.raises(AssertionError, match="a strided tensor"):
        kernel(x, torch.zeros(3, 16)[:, ::2])


def test_tokens_that_are_one_row_in_memory_are_refused(isa: str) -> None:
    """A distance of 0 says that tokens are packed, where kernels are told of it."""
    with pytest.raises(AssertionError, match="tokens lie apart"):
        native_kernel(isa, "linear")(torch.zeros(1, 8).expand(6, 8), torch.zeros(3, 8))


def test_gelu_is_as_exact_far_from_zero(isa: str) -> None:
    """Where it is tiny, as the relative error is what later layers see; infinity and NaN pass through."""
    x = torch.cat(
        (torch.linspace(-12, 12, 2001), torch.tensor([-50.0, 0.0, 1e-20, -1e-20, 50.0, torch.inf, torch.nan]))
    )
    for activation in ("gelu", "gelu_pytorch_tanh"):
        out = checked_kernel(isa, "linear")(x.unsqueeze(1), torch.ones(1, 1), activation=activation)[:, 0]
        expected = activated(x.double(), activation)
        small = 1e-30 if activation == "gelu" else 1e-6  # 1 + tanh has lost its digits there
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=small, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "relu2", "silu", "swiglu", "geglu", "gelu", "gelu_pytorch_tanh"])
def test_no_activation_makes_a_number_of_what_is_none(isa: str, activation: str | None, dtype: torch.dtype) -> None:
    x = torch.full((20, 32), torch.nan, dtype=dtype)
    out = checked_kernel(isa, "linear")(x, torch.ones(6, 32, dtype=dtype), activation=activation)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_each_head_is_multiplied_by_its_own_rows(isa: str, tokens: int, heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(tokens, heads, 80, generator=generator).to(dtype)[:, :, 16:]
    weight = torch.randn(heads * 24, 64, generator=generator).to(dtype)
    kernel = checked_kernel(isa, "linear")
    out = kernel(x, weight)
    assert out.shape == (tokens, heads, 24)
    for head in range(heads):
        assert torch.equal(out[:, head], kernel(x[:, head].contiguous(), weight[24 * head : 24 * (head + 1)]))
