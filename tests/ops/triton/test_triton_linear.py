"""Triton's epilogues, int8 products and products of weights in blocks against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops import scratch
from ostinato.ops.dispatch import triton_kernel
from ostinato.ops.operations import GATED, TRITON_BLOCKS
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.reference.matmul import ACTIVATIONS
from tests.support.block_weights import packed
from tests.support.triton_kernels import DTYPES, assert_close, check, require_triton, run_both

require_triton()

from ostinato.ops.triton import common  # noqa: E402

dtypes = st.sampled_from(DTYPES)
formats = st.sampled_from(sorted(TRITON_BLOCKS))


@settings(max_examples=25)
@given(
    dtype=dtypes,
    tokens=st.integers(0, 3),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    has_bias=st.booleans(),
    has_scale=st.booleans(),
    has_residual=st.booleans(),
    is_wide=st.booleans(),
)
def test_what_follows_a_product(
    dtype: torch.dtype,
    tokens: int,
    activation: str | None,
    has_bias: bool,
    has_scale: bool,
    has_residual: bool,
    is_wide: bool,
) -> None:
    torch.manual_seed(tokens)
    outputs = 12 if activation in GATED else 24
    out_dtype = torch.float32 if is_wide else None
    residual = torch.randn(tokens, outputs + 4)[:, :outputs].to(out_dtype or dtype)
    result, right, _, _ = run_both(
        "linear",
        torch.randn(tokens, 20).to(dtype),
        torch.randn(24, 20).to(dtype) / 4,
        torch.randn(24).to(dtype) if has_bias else None,
        residual if has_residual else None,
        activation,
        torch.rand(24) + 0.5 if has_scale else None,
        out_dtype,
    )
    # The reference rounds after each step, so that its errors are those of `dtype` even where the result is wider.
    assert (result.shape, result.dtype) == (right.shape, right.dtype)
    assert_close(result.to(dtype), right.to(dtype), tolerance={torch.float32: 1e-5}.get(dtype, 4 * _epsilon(dtype)))


def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


@settings(max_examples=15)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 3, 20]),
    in_size=st.sampled_from([16, 50, 70]),
    group_size=st.sampled_from([None, 5, 16, 32, 48]),
    has_bias=st.booleans(),
)
def test_int8_weights_with_a_scale_per_row_or_group(
    dtype: torch.dtype, tokens: int, in_size: int, group_size: int | None, has_bias: bool
) -> None:
    torch.manual_seed(in_size)
    weight, scale = quantize.quantize_int8(torch.randn(40, in_size), group_size)
    bias = torch.randn(40).to(dtype) if has_bias else None
    x = torch.randn(tokens, in_size + 3)[:, :in_size].to(dtype)
    check("linear", x, weight, bias, weight_scale=scale, group_size=group_size)


def test_an_int8_product_is_followed_like_another() -> None:
    weight, scale = quantize.quantize_int8(torch.randn(24, 32), 16)
    by = {"weight_scale": scale, "group_size": 16}
    check("linear", torch.randn(2, 32), weight, None, torch.randn(2, 12), "swiglu", torch.rand(24), **by)


@settings(max_examples=25)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 3, 20]),
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(TRITON_BLOCKS)), st.sampled_from([3, 16, 40])), min_size=1, max_size=2
    ),
    more=st.integers(0, 1),
    has_bias=st.booleans(),
    is_ordered=st.booleans(),
)
@pytest.mark.slow
def test_weights_in_blocks_of_one_format_or_of_several(
    dtype: torch.dtype, tokens: int, parts: list[tuple[str, int]], more: int, has_bias: bool, is_ordered: bool
) -> None:
    """With an order of inputs, as act-order has them, too."""
    generator = torch.Generator().manual_seed(tokens)
    parts.sort(reverse=True)
    in_size = max(BLOCK_FORMATS[name].elements for name, _ in parts) * (1 + more)
    outputs = sum(rows for _, rows in parts)
    weight = packed(tuple(parts), in_size, generator)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(tokens, in_size + 3, generator=generator)[:, :in_size].to(dtype)
    order = torch.randperm(in_size, generator=generator).int() if is_ordered else None
    check("linear", x, weight, bias, blocks=tuple(parts), order=order)


def test_a_product_of_blocks_is_followed_like_another() -> None:
    weight = packed((("int4_g32", 24),), 64, torch.Generator().manual_seed(0))
    residual, scale = torch.randn(2, 12), torch.rand(24)
    check("linear", torch.randn(2, 64), weight, None, residual, "swiglu", scale, blocks=(("int4_g32", 24),))


def test_a_product_in_another_order_allocates_what_the_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed((("int4_g32", 24),), 64, torch.Generator().manual_seed(0))
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(common, "run", lambda kernel, grid, launch, **arguments: started.append(arguments))
    order = torch.arange(64, dtype=torch.int32)
    triton_kernel("linear")(torch.randn(5, 64), weight, None, None, "relu2", blocks=(("int4_g32", 24),), order=order)
    taken = sum(started[0][name].nbytes for name in ("x", "out"))
    assert taken == scratch.triton_linear(tokens=5, out_size=24, element_bytes=4, in_size=64, in_order=True).shared


def test_a_scale_that_is_nan_reaches_its_output_alone() -> None:
    weight = packed((("int4_g32", 3),), 64, torch.Generator().manual_seed(0))
    weight[1, 3] = 0xFF
    weight[1, 2] |= 0xC0
    result = check("linear", torch.randn(2, 64), weight, blocks=(("int4_g32", 3),))
    assert result.isnan().tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize("activation", ["silu", "relu2", "swiglu", "geglu", "gelu", "gelu_pytorch_tanh"])
def test_large_inputs_and_nan_pass_through_an_activation(activation: str) -> None:
    x = torch.tensor([[-200.0], [-30.0], [0.0], [30.0], [200.0], [torch.nan]])
    check("linear", x, torch.ones(4, 1), None, None, activation)
