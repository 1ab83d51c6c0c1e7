"""The native norms against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import SETS, native_kernel

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
sizes = st.sampled_from([1, 3, 8, 16, 37, 64, 100, 256])


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` float64 over the root of the mean of its squares in the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@few
@given(
    st.integers(0, 5),
    st.integers(0, 3),
    sizes,
    st.sampled_from([0.01, 1.0, 100.0]),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
    dtypes,
    seeds,
)
def test_rms_norm_divides_by_the_root_of_the_mean_square(
    isa: str, tokens: int, heads: int, size: int, scale: float, offset: float, adds: bool, dtype: torch.dtype, seed: int
) -> None:
    """Of a token, or with `heads` of each of its heads, which may be part of something wider. The weight and the offset
    are added in float32: in bfloat16 a weight that is small beside 1 would lose its last bits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, heads, size) if heads else (tokens, size)
    x = spaced((torch.randn(shape, generator=generator) * scale).to(dtype), 7)
    weight = torch.randn(size, generator=generator).to(dtype)
    residual = torch.randn(shape, generator=generator).to(dtype) if adds else None
    out = checked_kernel(isa, "rms_norm")(x, weight, 1e-5, offset, residual)
    expected = normed(x.double(), 1e-5) * (weight.double() + offset)
    if residual is not None:
        expected = expected + residual.double()
    torch.testing.assert_close(out.double(), expected, rtol=rounding(dtype), atol=1e-6 if adds else 1e-7)


@few
@given(st.integers(0, 5), st.integers(1, 4), sizes, st.booleans(), st.booleans(), dtypes, seeds)
def test_gated_norm_takes_the_mean_over_each_group(
    isa: str,
    tokens: int,
    groups: int,
    size: int,
    norm_before_gate: bool,
    is_sigmoid: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced(torch.randn(tokens, groups * size, generator=generator).to(dtype), 5)
    gate = spaced(torch.randn(tokens, groups * size, generator=generator).to(dtype), 9)
    weight = torch.randn(groups * size, generator=generator).to(dtype)
    out = checked_kernel(isa, "gated_rms_norm")(x, gate, weight, 1e-5, size, norm_before_gate, is_sigmoid)
    by = (1 if is_sigmoid else gate.double()) / (1 + torch.exp(-gate.double()))
    values = x.double() if norm_before_gate else x.double() * by
    expected = normed(values.unflatten(1, (groups, size)), 1e-5).flatten(1) * weight.double()
    expected = expected * by if norm_before_gate else expected
    torch.testing.assert_close(out.double(), expected, rtol=rounding(dtype), atol=1e-7)


@few
@given(st.integers(0, 5), sizes, dtypes, seeds)
def test_without_a_weight_there_is_only_the_gate(
    isa: str, tokens: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced(torch.randn(tokens, size, generator=generator).to(dtype), 5)
    gate = spaced((torch.randn(tokens, size, generator=generator) * 10).to(dtype), 9)
    out = checked_kernel(isa, "gated_rms_norm")(x, gate, None, 1e-5, None)
    expected = x.double() * gate.double() / (1 + torch.exp(-gate.double()))
    torch.testing.assert_close(out.double(), expected, rtol=rounding(dtype), atol=1e-7)


@few
@given(st.integers(0, 5), sizes, st.sampled_from([0.0, 3.0, 100.0]), dtypes, seeds)
def test_layer_norm_takes_mean_and_variance_of_each_token(
    isa: str, tokens: int, size: int, centre: float, dtype: torch.dtype, seed: int
) -> None:
    """Also where the mean is far greater than the deviation from it."""
    generator = torch.Generator().manual_seed(seed)
    x = spaced((torch.randn(tokens, size, generator=generator) + centre).to(dtype), 7)
    weight, bias = torch.randn(2, size, generator=generator).to(dtype)
    out = checked_kernel(isa, "layer_norm")(x, weight, bias, 1e-5)
    wide = x.double()
    apart = wide - wide.mean(-1, keepdim=True)
    normed = apart / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * weight.double() + bias.double()
    # A mean is rounded as x is, and small deviations from it keep that error.
    scale = 1 + centre * 1e-7 / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt() / 1e-5
    allowed = rounding(dtype) * expected.abs() + 1e-5 * scale * (1 + weight.double().abs() + bias.double().abs())
    assert bool(((out.double() - expected).abs() <= allowed).all())


def test_a_token_has_the_same_bits_in_any_batch(isa: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = torch.randn(2, 5, 96, generator=generator).bfloat16()
    weight = torch.randn(96, generator=generator).bfloat16()
    plain, gated = checked_kernel(isa, "rms_norm"), checked_kernel(isa, "gated_rms_norm")
    for token in range(5):
        part = slice(token, token + 1)
        assert same_bits(plain(x[part], weight, 1e-5), plain(x, weight, 1e-5)[part])
        for order, is_sigmoid in ((False, False), (True, False), (True, True)):
            how = (weight, 1e-5, 32, order, is_sigmoid)
            assert same_bits(gated(x[part], gate[part], *how), gated(x, gate, *how)[part])


def test_a_gate_is_exact_near_zero_and_at_its_limits(isa: str) -> None:
    """Without a weight, the gate's SiLU alone is multiplied with x."""
    gate = torch.cat([torch.linspace(-110, 110, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])])[None]
    given = native_kernel(isa, "gated_rms_norm")(torch.ones_like(gate), gate, None, 1e-5, None)
    expected = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(given.double(), expected, rtol=2e-6, atol=1e-34)
    sigmoid = native_kernel(isa, "gated_rms_norm")(torch.ones_like(gate), gate, None, 1e-5, None, False, True)
    torch.testing.assert_close(sigmoid.double(), torch.sigmoid(gate.double()), rtol=2e-6, atol=1e-34)
    odd = torch.tensor([[math.nan, math.inf, -math.inf]])
    given = native_kernel(isa, "gated_rms_norm")(torch.ones_like(odd), odd, None, 1e-5, None)
    torch.testing.assert_close(given, torch.tensor([[math.nan, math.inf, math.nan]]), equal_nan=True)


@few
@given(
    st.integers(0, 5),
    sizes,
    st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu2"]),
    st.sampled_from([0.01, 1.0, 20.0]),
    dtypes,
    seeds,
)
def test_the_first_half_of_a_tokens_values_gates_the_second(
    isa: str, tokens: int, size: int, activation: str, scale: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced((torch.randn(tokens, 2 * size, generator=generator) * scale).to(dtype), 5)
    out = checked_kernel(isa, "gated_activation")(x, activation)
    gates, values = x.double().chunk(2, dim=1)
    by_name = {
        "silu": gates / (1 + torch.exp(-gates)),
        "gelu": gates * torch.special.erfc(-gates / math.sqrt(2)) / 2,
        "gelu_pytorch_tanh": gates / (1 + torch.exp(-math.sqrt(8 / math.pi) * (gates + 0.044715 * gates**3))),
        "relu2": gates.clamp(min=0).square(),
    }
    expected = by_name[activation] * values
    fits = expected.abs() < torch.finfo(dtype).max * 0.999
    torch.testing.assert_close(out.double()[fits], expected[fits], rtol=rounding(dtype) + 3e-6, atol=1e-7)
    assert (out.double()[~fits].abs() > torch.finfo(dtype).max * 0.99).all()


@few
@given(st.integers(0, 5), sizes, st.sampled_from([0.0, 1.0]), dtypes, seeds)
def test_gates_are_clamped_above_and_values_on_both_sides(
    isa: str, tokens: int, size: int, offset: float, dtype: torch.dtype, seed: int
) -> None:
    x = spaced((torch.randn(tokens, 2 * size, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype), 5)
    out = checked_kernel(isa, "gated_activation")(x, "silu", (1.3, 0.9, offset))
    gates, values = x.double().chunk(2, dim=1)
    gates, values = gates.clamp(max=0.9), values.clamp(-0.9, 0.9)
    expected = gates / (1 + torch.exp(-1.3 * gates)) * (values + offset)
    torch.testing.assert_close(out.double(), expected, rtol=rounding(dtype) + 3e-6, atol=1e-7)


def test_a_gated_token_has_the_same_bits_in_any_batch(isa: str) -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(2)).bfloat16()
    kernel = checked_kernel(isa, "gated_activation")
    for token in range(5):
        assert same_bits(kernel(x[token : token + 1], "gelu"), kernel(x, "gelu")[token : token + 1])


def test_an_activation_that_has_gates_itself_gates_nothing(isa: str) -> None:
    with pytest.raises(AssertionError, match="gated_activation: an activation of one value"):
        native_kernel(isa, "gated_activation")(torch.randn(2, 8), "swiglu")
    with pytest.raises(AssertionError, match="gated_activation: a clamp of silu"):
        native_kernel(isa, "gated_activation")(torch.randn(2, 8), "gelu", (1.0, 2.0, 0.0))


@few
@given(st.integers(0, 5), sizes, dtypes, seeds)
def test_two_vectors_of_a_token_are_multiplied_and_rounded_once(
    isa: str, tokens: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = (spaced((torch.randn(tokens, size, generator=generator) * 8).to(dtype), 5) for _ in range(2))
    out = checked_kernel(isa, "multiply")(first, second)
    # A product of two values of a dtype has at most twice its digits.
    assert torch.equal(out, (first.double() * second.double()).to(dtype))
    for other in (second, spaced(second[:1].clone(), 3)) if tokens else (second,):
        assert torch.equal(checked_kernel(isa, "add")(first, other), (first.float() + other.float()).to(dtype))


@few
@given(
    st.integers(0, 5), sizes, st.sampled_from([(-1.5, 0.7), (float("-inf"), 0.3), (0.1, float("inf"))]), dtypes, seeds
)
def test_a_vector_is_clipped_and_its_nan_stays(
    isa: str, tokens: int, size: int, bounds: tuple[float, float], dtype: torch.dtype, seed: int
) -> None:
    x = spaced(torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed)).to(dtype), 5)
    x[:, 0] = float("nan")
    out = checked_kernel(isa, "clip")(x, torch.tensor(bounds))
    assert out[:, 0].isnan().all()
    assert torch.equal(out[:, 1:], x[:, 1:].double().clamp(*torch.tensor(bounds).double()).to(dtype))


@few
@given(st.integers(1, 5), sizes, st.booleans(), st.booleans(), dtypes, seeds)
def test_one_number_multiplies_all_channels_of_a_token_or_of_all_tokens(
    isa: str, tokens: int, size: int, is_shared: bool, is_float32: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = spaced((torch.randn(tokens, size, generator=generator) * 8).to(dtype), 5)
    second = torch.randn(1 if is_shared else tokens, 1, generator=generator)
    second = second if is_float32 else spaced(second.to(dtype), 3)
    out = checked_kernel(isa, "multiply")(first, second)
    assert torch.equal(out, (first.float() * second.float()).to(dtype))


@few
@given(st.integers(0, 5), st.integers(1, 5), st.sampled_from([1, 3, 16, 37, 64]), dtypes, seeds)
def test_a_gate_of_heads_is_strided_or_one_number_for_a_head(
    isa: str, tokens: int, heads: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced(torch.randn(tokens, heads * size, generator=generator).to(dtype), 5)
    both = (torch.randn(tokens, heads, 2 * size, generator=generator) * 10).to(dtype)
    kernel = checked_kernel(isa, "gated_rms_norm")
    strided, gates = both[:, :, size:], spaced(both[:, :, 0], 3)
    out = kernel(x, strided, None, 1e-5, None, False, True)
    expected = x.double() * strided.double().sigmoid().flatten(1)
    torch.testing.assert_close(out.double(), expected, rtol=rounding(dtype), atol=1e-7)
    out = kernel(x, gates, None, 1e-5, None, False, True)
    expected = x.double() * gates.double().sigmoid().repeat_interleave(size, 1)
    torch.testing.assert_close(out.double(), expected, rtol=rounding(dtype), atol=1e-7)


def test_a_norm_rounds_a_wide_residual_stream_first(isa: str) -> None:
    generator = torch.Generator().manual_seed(4)
    kernel = checked_kernel(isa, "rms_norm")
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.randn(3, 2, 50, generator=generator), torch.randn(50, generator=generator).to(dtype)
        assert same_bits(kernel(x[:, 1], weight, 1e-5), kernel(x[:, 1].to(dtype), weight, 1e-5))


def test_vectors_of_two_sizes_are_not_multiplied(isa: str) -> None:
    with pytest.raises(AssertionError, match="multiply: vectors of one size"):
        native_kernel(isa, "multiply")(torch.randn(2, 8), torch.randn(2, 7))
