"""Some tokens of bfloat16 times 8-bit weights and blocks, whose rows the kernel makes bfloat16 once for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.plan.device.kernel_support import CPU_FLAGS
from tests.support.block_weights import block_rows, expanded
from tests.support.examples import examples
from tests.support.guarded import guarded
from tests.support.native_kernels import checked_kernel, same_bits, spaced
from tests.support.native_sets import PRODUCT_SETS, first_m, last_m, uses_tiles

pytest.importorskip("gguf", reason="the package that says what blocks stand for comes with the test extra")

pytestmark = pytest.mark.parametrize("isa", PRODUCT_SETS)

some = examples(40)
INT8 = "int8"
ROW = "gemm_bf16_dequant_avx512bf16"
kinds = st.sampled_from([INT8, *sorted(BLOCK_FORMATS)])
token_counts = st.integers(first_m(ROW), last_m(ROW))
in_counts = st.sampled_from([1, 2, 5, 8, 9, 16, 17, 33, 41])
"""Blocks of a row: groups of 256 inputs that are whole and that are not, and one span or several."""
out_sizes = st.sampled_from([1, 2, 3, 17, 34, 70])
AS_FEWER = first_m(ROW) - 1
"""Tokens that are multiplied with the same rounded weights, but as these lie."""


def product(
    isa: str, kind: str, rows: int, in_count: int, generator: torch.Generator
) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """A product with random weights, and these as float64 [rows, in]."""
    kernel = checked_kernel(isa, "linear")
    if kind == INT8:
        shape = (rows, 32 * in_count)
        weight = guarded(torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator))
        scale = torch.rand(rows, generator=generator) / 128
        return partial(kernel, weight=weight, weight_scale=scale), weight.double() * scale.double()[:, None]
    in_size = in_count * BLOCK_FORMATS[kind].elements
    weight, blocks = guarded(block_rows(kind, rows, in_size, generator)), ((kind, rows),)
    return partial(kernel, weight=weight, blocks=blocks), expanded(weight, blocks, in_size)


@some
@given(token_counts, kinds, in_counts, out_sizes, st.sampled_from([None, "swiglu"]), st.integers(0, 2**31))
def test_products_are_those_of_float64_and_read_nothing_behind_weights_and_tokens(
    isa: str, tokens: int, kind: str, in_count: int, out_size: int, activation: str | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    call, weight = product(isa, kind, (2 if activation else 1) * out_size, in_count, generator)
    x = guarded(torch.randn(tokens, weight.shape[1], generator=generator).bfloat16())
    out = call(x, activation=activation)
    expected, largest = x.double() @ weight.T, x.double().abs() @ weight.abs().T + 1
    if activation:
        (gates, values), sizes = expected.chunk(2, dim=-1), largest.chunk(2, dim=-1)
        expected, largest = gates * gates.sigmoid() * values, (sizes[0] + 1) * (sizes[1] + 1)
    assert ((out.double() - expected).abs() <= 2.0**-6 * (largest + expected.abs())).all()


@some
@given(token_counts, kinds, in_counts, out_sizes, st.integers(0, 2**31))
def test_a_tokens_bits_are_those_that_it_has_among_fewer(
    isa: str, tokens: int, kind: str, in_count: int, out_size: int, seed: int
) -> None:
    if uses_tiles(isa) or "avx512_bf16" not in CPU_FLAGS["x86_64"].get(isa, ()):
        pytest.skip("more tokens are added up in another order there")
    generator = torch.Generator().manual_seed(seed)
    call, weight = product(isa, kind, out_size, in_count, generator)
    x = spaced(torch.randn(tokens, weight.shape[1], generator=generator).bfloat16(), 32)
    out = call(x)
    for begin in {*range(0, tokens - AS_FEWER, AS_FEWER), tokens - AS_FEWER}:
        assert same_bits(out[begin : begin + AS_FEWER], call(x[begin : begin + AS_FEWER]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_token(isa: str, bad: float) -> None:
    for kind in (INT8, "Q4_K", "Q8_0", "int4_g128"):
        generator = torch.Generator().manual_seed(0)
        call, weight = product(isa, kind, 40, 9, generator)
        x = torch.randn(33, weight.shape[1], generator=generator).bfloat16()
        clean = call(x)
        x[7, 3] = bad
        out = call(x)
        assert not out[7].isfinite().any()
        others = torch.arange(33) != 7
        assert same_bits(out[others], clean[others])
