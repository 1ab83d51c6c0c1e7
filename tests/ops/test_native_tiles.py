"""Products on matrix units: the instruction by the manual's formula, and what kernels make of it.

On a processor without matrix units a stand-in in plain C++ runs the same kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.dispatch import load_extension
from ostinato.ops.reference import matmul
from ostinato.ops.sizes import AMX_PANEL_K, TILE_GROUP_BYTES
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, same_bits, spaced
from tests.support.native_sets import TILED_SETS, first_m, native_kernel, record, threads
from tests.support.tiles import DEPTH, SIDE, pairs, tile_product

pytestmark = pytest.mark.parametrize("isa", TILED_SETS)

some = examples(30)
seeds = st.integers(0, 2**31)
LEAST_NORMAL = 2.0**-126


def run_instruction(isa: str, left: torch.Tensor, right: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    out = sums.clone()
    with threads(1):
        load_extension(isa).tile_product(SIDE, {"left": left, "right": pairs(right), "out": out})
    return out


@some
@given(st.sampled_from([0, -20, -63, -70, -120]), seeds)
def test_the_instruction_gives_the_bits_of_the_manuals_formula(isa: str, exponent: int, seed: int) -> None:
    """Also where operands, products or sums are denormal."""
    generator = torch.Generator().manual_seed(seed)

    def values(rows: int, columns: int, least: int) -> torch.Tensor:
        spread = torch.randint(-12, 12, (rows, columns), generator=generator)
        return torch.randn(rows, columns, generator=generator) * 2.0 ** (spread + least)

    left, right = values(SIDE, DEPTH, exponent).bfloat16(), values(DEPTH, SIDE, min(exponent, -3)).bfloat16()
    sums = values(SIDE, SIDE, max(2 * exponent, -130))
    assert torch.equal(run_instruction(isa, left, right, sums), tile_product(left, right, sums))


def test_the_instruction_passes_infinity_and_nan_to_their_own_sums(isa: str) -> None:
    left, right = torch.ones(SIDE, DEPTH).bfloat16(), torch.ones(DEPTH, SIDE).bfloat16()
    left[3, 7], left[5, 8], right[9, 2], right[10, 4] = torch.inf, torch.nan, -torch.inf, 0
    left[6, 10] = torch.inf
    out = run_instruction(isa, left, right, torch.zeros(SIDE, SIDE))
    expected = left.double() @ right.double()
    assert same_bits(out.double(), expected)


def test_no_thread_keeps_its_tiles(isa: str) -> None:
    """A program's calls run on the same threads, and so do calls by themselves. It holds no tensor: they live here."""
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    choices = torch.stack((torch.zeros(40, 1), torch.ones(40, 1)), dim=1)
    up, down = weight[None], weight.T.contiguous()[None]
    calls = {"linear": (torch.empty(40, 96).bfloat16(), x, weight)}
    calls["moe"] = (torch.empty_like(x), x, choices, up, down, "silu")
    palettes = torch.full((2,), -1, dtype=torch.int32)
    with threads(2):
        for name, (out, *args) in calls.items():
            program = record(isa, native_kernel(isa, name), out, *args)
            program.tile_palettes(40, {"out": palettes})
            program.run(40)
            assert palettes.tolist() == [0, 0]
            native_kernel(isa, name)(*args)
            load_extension(isa).tile_palettes(40, {"out": palettes.fill_(-1)})
            assert palettes.tolist() == [0, 0]


def product(isa: str, x: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
    return checked_kernel(isa, "linear")(x, weight, out_dtype=torch.float32, **options)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("in_size", "out_size"), [(300, 70), (2 * AMX_PANEL_K + 96, 64), (2080, 33)])
def test_a_token_has_the_same_bits_among_few_and_many(isa: str, in_size: int, out_size: int, bits: int) -> None:
    """Whether weights are read where they lie, for few tokens, or copied, and in however many groups tokens come."""
    torch.manual_seed(0)
    x = torch.randn(600, in_size).bfloat16()
    weight = torch.randn(out_size, in_size).bfloat16()
    call = partial(native_kernel(isa, "linear"), weight=weight, activation="silu", out_dtype=torch.float32)
    if bits == 8:
        whole = torch.randint(-128, 128, weight.shape, dtype=torch.int8)
        scales = torch.rand(out_size, -(-in_size // 128))
        call = partial(
            native_kernel(isa, "linear"), weight=whole, weight_scale=scales, group_size=128, out_dtype=torch.float32
        )
    together = call(x)
    for tokens in (first_m("gemm_bf16_any_amx"), 17, 32, 33, 48, 130, 599):
        assert same_bits(call(x[:tokens]), together[:tokens])
        assert same_bits(call(x[-tokens:]), together[-tokens:])


@pytest.mark.parametrize("scales", ["rows", "groups"])
@pytest.mark.parametrize("in_size", [263, 64, 33, 31])
def test_an_integer_of_8_bits_is_multiplied_as_itself(isa: str, in_size: int, scales: str) -> None:
    """Each of the 256, at any place of a row: a token with a single one picks an input."""
    out_size = 256 if in_size < 256 else 40
    weight = ((torch.arange(out_size)[:, None] + torch.arange(in_size)) % 256 - 128).to(torch.int8)
    options: dict[str, object] = {"weight_scale": torch.ones(out_size)}
    if scales == "groups":
        options = {"weight_scale": torch.ones(out_size, -(-in_size // 32)), "group_size": 32}
    out = product(isa, torch.eye(in_size).bfloat16(), weight, **options)
    assert torch.equal(out, weight.T.float())


@some
@given(st.integers(first_m("gemm_bf16_any_amx"), 90), st.integers(1, 120), st.integers(1, 90), st.booleans(), seeds)
def test_infinity_and_nan_reach_their_own_outputs_alone(
    isa: str, tokens: int, in_size: int, out_size: int, is_quantized: bool, seed: int
) -> None:
    """What pads tiles, and what lies behind weights and tokens, reaches none."""
    generator = torch.Generator().manual_seed(seed)
    x = spaced(torch.randn(tokens, in_size, generator=generator).bfloat16(), 3)
    around = torch.full((out_size + 2, in_size), torch.nan).bfloat16()
    weight = around[1:-1]
    weight.copy_(torch.randn(out_size, in_size, generator=generator))

    def any_of(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    x[any_of(tokens), any_of(in_size)] = torch.inf
    x[any_of(tokens), any_of(in_size)] = torch.nan
    options: dict[str, object] = {}
    exact = weight.double()
    if is_quantized:
        weight = torch.randint(-128, 128, weight.shape, dtype=torch.int8, generator=generator)
        exact, options = weight.double(), {"weight_scale": torch.ones(out_size)}
    else:
        weight[any_of(out_size), any_of(in_size)] = -torch.inf
        exact = weight.double()
    out = product(isa, x, weight, **options)
    expected = x.double() @ exact.T
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-2, equal_nan=True)


@some
@given(st.integers(1, 400), st.floats(-66, -50), seeds)
def test_that_denormals_count_as_zero_costs_less_than_the_least_normal_number_a_term(
    isa: str, in_size: int, exponent: float, seed: int
) -> None:
    """An operand that is denormal is less than 2^-126, and so is every product or sum that is taken for zero: with
    operands up to 2^6 an output is off by that much a term, where models' activations are 2^100 times as large."""
    generator = torch.Generator().manual_seed(seed)
    size = 2.0**exponent
    x = (torch.randn(20, in_size, generator=generator) * size).bfloat16()
    weight = (torch.randn(40, in_size, generator=generator) * size).bfloat16()
    weight[0] = LEAST_NORMAL / 3
    x[1] = x[1].sign() * 2.0**6
    out = product(isa, x, weight)
    terms = x.double().abs() @ weight.double().abs().T
    error = (out.double() - x.double() @ weight.double().T).abs()
    assert bool((error <= 1e-5 * terms + 2.0**7 * in_size * LEAST_NORMAL).all())
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("size", "inner"), [(100, 70), (96, 33), (700, 600)])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_experts_of_many_tokens_give_what_the_definition_does(
    isa: str, size: int, inner: int, activation: str, bits: int
) -> None:
    """Some experts have one token, some hundreds, one none; its weights are no numbers."""
    generator = torch.Generator().manual_seed(size)
    randn = partial(torch.randn, generator=generator)
    tokens, rows = 200, 2 * inner if activation == "swiglu" else inner
    ids = torch.stack((torch.zeros(tokens), torch.arange(tokens) % 2 + 1), dim=1)
    ids[7, 1] = 3
    choices = torch.stack((ids, torch.rand(tokens, 2, generator=generator)), dim=1)
    x = randn(tokens, size).bfloat16()
    up, down = (randn(5, rows, size) / size**0.5).bfloat16(), (randn(5, size, inner) / inner**0.5).bfloat16()
    scales: tuple[torch.Tensor | int, ...] = ()
    exact = up.double(), down.double()
    if bits == 8:
        up, down = ((each * 40).round().clamp(-127, 127).to(torch.int8) for each in (up, down))
        scales = (torch.rand(5, rows) / 20, torch.rand(5, size) / 20)
        exact = up.double() * scales[0].double()[..., None], down.double() * scales[1].double()[..., None]
    else:
        up[4] = down[4] = torch.nan
    out = checked_kernel(isa, "moe")(x, choices, up, down, activation, x, *scales)
    expected = matmul.moe(x.double(), choices, *exact, activation, x.double())
    # What is between the two products is rounded to bfloat16, and terms may cancel.
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.05 * float(expected.abs().mean()))


def test_a_token_that_is_no_number_spoils_no_other_of_its_expert(isa: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 50, generator=generator).bfloat16()
    up, down = (torch.randn(1, *shape, generator=generator).bfloat16() / 7 for shape in ((45, 50), (50, 45)))
    choices = torch.stack((torch.zeros(40, 1), torch.ones(40, 1)), dim=1)
    kernel = checked_kernel(isa, "moe")
    clean = kernel(x, choices, up, down, "relu2")
    spoilt = x.clone()
    spoilt[3, 2], spoilt[20, 49] = torch.nan, torch.inf
    out = kernel(spoilt, choices, up, down, "relu2")
    others = [t for t in range(40) if t not in (3, 20)]
    assert same_bits(out[others], clean[others])
    assert bool(out[3].isnan().all())


def test_an_expert_may_have_more_choices_than_there_are_tokens_and_than_a_cache_holds(isa: str) -> None:
    """They pass by in groups; a token may choose an expert twice."""
    generator = torch.Generator().manual_seed(2)
    tokens, size, inner = 150, 4096, 20
    x = torch.randn(tokens, size, generator=generator).bfloat16()
    up = (torch.randn(2, inner, size, generator=generator) / size**0.5).bfloat16()
    down = torch.randn(2, size, inner, generator=generator).bfloat16()
    ids, weights = torch.zeros(tokens, 3), torch.rand(tokens, 3, generator=generator)
    ids[:, 2] = 1
    twice = torch.stack((ids, weights), dim=1)
    once = torch.stack((ids[:, 1:], torch.stack((weights[:, 0] + weights[:, 1], weights[:, 2]), dim=1)), dim=1)
    assert 2 * tokens * size * 2 > TILE_GROUP_BYTES
    out = checked_kernel(isa, "moe")(x, twice, up, down, "silu")
    expected = matmul.moe(x.double(), once, up.double(), down.double(), "silu")
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.05 * float(expected.abs().mean()))
