"""The native experts, routers and concatenation against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.operations import GATED
from ostinato.ops.quant import quantize
from ostinato.ops.reference import matmul
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, rounding, same_bits, spaced
from tests.support.native_sets import PRODUCT_SETS, SETS, native_kernel

experts_of = pytest.mark.parametrize("isa", PRODUCT_SETS)
every_set = pytest.mark.parametrize("isa", SETS)

few = examples(40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
sizes = st.sampled_from([1, 5, 16, 31, 64, 100])
activations = st.sampled_from(["relu2", "silu", "swiglu", "geglu"])


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def random_choices(generator: torch.Generator, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Different experts for each token."""
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    return torch.stack((ids.float(), torch.rand(tokens, top_k, generator=generator) + 0.5), dim=1)


def random_experts(
    generator: torch.Generator, experts: int, size: int, inner: int, activation: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = 2 * inner if activation in GATED else inner
    up = normal(generator, experts, rows, size) / size**0.5
    return up.to(dtype), (normal(generator, experts, size, inner) / inner**0.5).to(dtype)


@experts_of
@few
@given(
    st.integers(0, 40), st.integers(1, 9), st.integers(1, 4), sizes, sizes, activations, dtypes, st.booleans(), seeds
)
def test_each_token_gets_what_its_experts_give(
    isa: str,
    tokens: int,
    experts: int,
    top_k: int,
    size: int,
    inner: int,
    activation: str,
    dtype: torch.dtype,
    adds: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced(normal(generator, tokens, size).to(dtype), 3)
    choices = random_choices(generator, tokens, experts, min(top_k, experts))
    up, down = random_experts(generator, experts, size, inner, activation, dtype)
    residual = spaced(normal(generator, tokens, size).to(dtype), 5) if adds else None
    out = checked_kernel(isa, "moe")(x, choices, up, down, activation, residual)
    wide = None if residual is None else residual.double()
    expected = matmul.moe(x.double(), choices, up.double(), down.double(), activation, wide)
    # What is between the two products is rounded as well.
    tolerance = 3 * rounding(dtype)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 4)


@experts_of
@few
@given(st.integers(0, 80), sizes, sizes, st.booleans(), st.sampled_from([0.0, 1.0]), dtypes, seeds)
def test_biases_are_added_before_the_activation_and_the_weights_and_gates_are_clamped(
    isa: str, tokens: int, size: int, inner: int, in_8_bits: bool, offset: float, dtype: torch.dtype, seed: int
) -> None:
    """Of each other expert all biases are large, so that a wrong row would show."""
    generator = torch.Generator().manual_seed(seed)
    x, choices = normal(generator, tokens, size).to(dtype), random_choices(generator, tokens, 4, 2)
    up, down = random_experts(generator, 4, size, inner, "swiglu", torch.float32 if in_8_bits else dtype)
    biases = [normal(generator, *weight.shape[:2]) * torch.tensor([1.0, 3.0] * 2)[:, None] for weight in (up, down)]
    further: dict[str, object] = {"up_bias": biases[0], "down_bias": biases[1], "clamp": (1.3, 0.9, offset)}
    exact, scales = [up, down], []
    if in_8_bits:
        for i, weight in enumerate((up, down)):
            whole, scale = quantize.quantize_int8(weight.flatten(0, 1), None)
            exact[i] = quantize.dequantize(whole, scale.double(), None).view(weight.shape)
            scales.append((whole.view(weight.shape), scale.view(weight.shape[:2])))
        (up, up_scale), (down, down_scale) = scales
        further |= {"up_scale": up_scale, "down_scale": down_scale}
    out = checked_kernel(isa, "moe")(x, choices, up, down, "swiglu", x, **further)
    of_definition = {name: further[name] for name in ("up_bias", "down_bias", "clamp")}
    expected = matmul.moe(x.double(), choices, *(w.double() for w in exact), "swiglu", x.double(), **of_definition)
    tolerance = 3 * rounding(dtype)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 8)


@experts_of
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_among_others(isa: str, dtype: torch.dtype, deterministic: bool) -> None:
    """With `deterministic`; else an expert with many tokens takes a kernel of another order."""
    generator = torch.Generator().manual_seed(7)
    x = normal(generator, 300, 1500).to(dtype)
    choices = random_choices(generator, 300, 3, 2)
    experts = random_experts(generator, 3, 1500, 40, "swiglu", dtype)
    kernel = checked_kernel(isa, "moe", deterministic=deterministic)
    together = kernel(x, choices, *experts, "swiglu", x)
    expected = matmul.moe(x.double(), choices, *(w.double() for w in experts), "swiglu", x.double())
    tolerance = 3 * rounding(dtype)
    for begin, end in ((0, 1), (7, 10), (100, 139), (299, 300)):
        alone = kernel(x[begin:end], choices[begin:end], *experts, "swiglu", x[begin:end])
        if deterministic:
            assert same_bits(alone, together[begin:end])
        else:
            torch.testing.assert_close(alone.double(), expected[begin:end], rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(together.double(), expected, rtol=tolerance, atol=4 * tolerance)


@experts_of
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_may_choose_an_expert_twice(isa: str, dtype: torch.dtype) -> None:
    """As with infinite scores."""
    generator = torch.Generator().manual_seed(8)
    x, experts = normal(generator, 1, 1500).to(dtype), random_experts(generator, 3, 1500, 400, "swiglu", dtype)
    choices = torch.tensor([[[1.0, 1.0], [0.3, 0.6]]])
    out = checked_kernel(isa, "moe")(x, choices, *experts, "swiglu")
    expected = matmul.moe(x.double(), choices, *(w.double() for w in experts), "swiglu")
    torch.testing.assert_close(out.double(), expected, rtol=3 * rounding(dtype), atol=12 * rounding(dtype))


@experts_of
@pytest.mark.parametrize("count", [1, 2, 5])
def test_experts_that_nobody_chose_are_not_read(isa: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x = normal(generator, 6, 24)
    up, down = random_experts(generator, 8, 24, 20, "relu2", torch.float32)
    chosen = torch.arange(8)[-count:]
    choices = random_choices(generator, 6, count, min(count, 2))
    expected = matmul.moe(x.double(), choices, up[chosen].double(), down[chosen].double(), "relu2")
    choices[:, 0] += 8 - count
    up[: 8 - count] = down[: 8 - count] = torch.nan
    out = checked_kernel(isa, "moe")(x, choices, up, down, "relu2")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@experts_of
@few
@given(st.integers(0, 20), sizes, sizes, activations, st.sampled_from([None, 32, 64]), dtypes, seeds)
def test_experts_of_8_bits_are_multiplied_by_their_scales(
    isa: str, tokens: int, size: int, inner: int, activation: str, group_size: int | None, dtype: torch.dtype, seed: int
) -> None:
    """The weights are exact; so only what is between the two products is rounded."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, tokens, size).to(dtype)
    choices = random_choices(generator, tokens, 5, 2)
    weights, scales, exact = [], [], []
    for weight in random_experts(generator, 5, size, inner, activation, torch.float32):
        whole, scale = quantize.quantize_int8(weight.flatten(0, 1), group_size)
        weights.append(whole.view(weight.shape))
        scales.append(scale.view(*weight.shape[:2], *scale.shape[1:]))
        exact.append(quantize.dequantize(whole, scale.double(), group_size).view(weight.shape))
    out = checked_kernel(isa, "moe")(x, choices, *weights, activation, x, *scales, group_size)
    expected = matmul.moe(x.double(), choices, *exact, activation, x.double())
    tolerance = 3 * rounding(dtype)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 4)


@experts_of
def test_a_token_may_choose_an_expert_twice(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = normal(generator, 2, 8)
    up, down = random_experts(generator, 4, 8, 6, "silu", torch.float32)
    twice = torch.tensor([[[3.0, 1, 3], [0.5, 2, 0.25]]] * 2)
    once = torch.tensor([[[1.0, 3], [2, 0.75]]] * 2)
    expected = matmul.moe(x.double(), once, up.double(), down.double(), "silu")
    out = checked_kernel(isa, "moe")(x, twice, up, down, "silu")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@experts_of
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_experts_with_more_or_fewer_rows_than_their_activation_takes_are_refused(isa: str, activation: str) -> None:
    rows = 6 if activation == "swiglu" else 12
    x, choices = torch.zeros(2, 8), torch.tensor([[[1.0], [1]]] * 2)
    with pytest.raises(AssertionError, match="as many rows as its activation takes"):
        native_kernel(isa, "moe")(x, choices, torch.zeros(4, rows, 8), torch.zeros(4, 8, 6), activation)


groupings = st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3), (8, 8)])


@every_set
@few
@given(st.integers(0, 30), st.sampled_from([1, 2, 5, 9]), sizes, groupings, st.booleans(), dtypes, seeds)
def test_sigmoid_routing_is_its_definition(
    isa: str,
    tokens: int,
    per_group: int,
    size: int,
    groups: tuple[int, int],
    normalize: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    num_groups, top_groups = groups
    per_group = max(per_group, 2)
    generator = torch.Generator().manual_seed(seed)
    x = spaced(normal(generator, tokens, size).to(dtype), 3)
    weight = normal(generator, num_groups * per_group, size).to(dtype)
    bias = normal(generator, num_groups * per_group)
    options = (min(4, top_groups * per_group), num_groups, top_groups, normalize, 2.5, False, 0.3)
    out = checked_kernel(isa, "route")(x, weight, bias, *options)
    expected = matmul.route(x, weight, bias, *options)
    assert torch.equal(out[:, 0], expected[:, 0])
    torch.testing.assert_close(out[:, 1], expected[:, 1], rtol=1e-4, atol=1e-6)


@every_set
@few
@given(
    st.integers(0, 30),
    st.sampled_from([1, 6, 16, 35, 62]),
    sizes,
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    dtypes,
    seeds,
)
def test_softmax_routing_is_its_definition(
    isa: str,
    tokens: int,
    experts: int,
    size: int,
    top_k: int,
    softmax_over_all: bool,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = spaced(normal(generator, tokens, size).to(dtype), 3)
    weight = normal(generator, experts, size).to(dtype)
    options = {"scaling": 0.5, "softmax_over_all": softmax_over_all}
    options["bias"] = normal(generator, experts) if has_bias else None
    options["expert_scales"] = normal(generator, experts) if has_bias == softmax_over_all else None
    out = checked_kernel(isa, "route")(x, weight, None, min(top_k, experts), **options)
    expected = matmul.route(x, weight, None, min(top_k, experts), **options)
    assert torch.equal(out[:, 0], expected[:, 0])
    torch.testing.assert_close(out[:, 1], expected[:, 1], rtol=1e-4, atol=1e-6)


@every_set
@pytest.mark.parametrize("bias", [None, torch.zeros(40)])
def test_of_experts_that_are_equally_good_the_first_are_chosen(isa: str, bias: torch.Tensor | None) -> None:
    weight = torch.zeros(40, 4)
    weight[[7, 20, 21, 39]] = 1.0
    kernel = checked_kernel(isa, "route")
    for kind in (kernel, matmul.route):
        assert kind(torch.ones(2, 4), weight, bias, 3)[:, 0].tolist() == [[7, 20, 21]] * 2
        assert kind(-torch.ones(2, 4), weight, bias, 3)[:, 0].tolist() == [[0, 1, 2]] * 2


@every_set
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_token_that_is_no_number_gets_experts_that_there_are(isa: str, groups: tuple[int, int]) -> None:
    weight, bias = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(12)
    for correction in (bias, None):
        out = checked_kernel(isa, "route")(torch.full((3, 4), torch.nan), weight, correction, 4, *groups)
        ids = out[:, 0]
        assert ((ids >= 0) & (ids < 12)).all()
        assert out[:, 1].isnan().all()


@every_set
def test_scores_have_the_same_bits_among_others(isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = normal(generator, 300, 1500).bfloat16(), normal(generator, 37, 1500).bfloat16()
    kernel = checked_kernel(isa, "route")
    together = kernel(x, weight, None, 5)
    for begin, end in ((0, 1), (7, 10), (100, 139), (299, 300)):
        assert same_bits(kernel(x[begin:end], weight, None, 5), together[begin:end])


@every_set
@few
@given(st.integers(0, 9), sizes, sizes, dtypes, seeds)
def test_two_vectors_stand_one_behind_the_other(
    isa: str, tokens: int, first: int, second: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (spaced(normal(generator, tokens, size).to(dtype), 3) for size in (first, second))
    assert torch.equal(checked_kernel(isa, "concat")(a, b), torch.cat((a, b), dim=1))
    with_heads = [part.repeat(1, 3).unflatten(1, (3, -1)) for part in (a, b)]
    assert torch.equal(checked_kernel(isa, "concat")(*with_heads), torch.cat(with_heads, dim=2))
