"""Triton's epilogues and int8 products against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops import int8
from ostinato.ops.activations import ACTIVATIONS
from ostinato.ops.facts import GATED
from tests.support.triton_kernels import DTYPES, assert_close, check, require_triton, run_both

require_triton()

dtypes = st.sampled_from(DTYPES)


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
    weight, scale = int8.quantize(torch.randn(40, in_size), group_size)
    bias = torch.randn(40).to(dtype) if has_bias else None
    x = torch.randn(tokens, in_size + 3)[:, :in_size].to(dtype)
    check("linear", x, weight, bias, weight_scale=scale, group_size=group_size)


def test_an_int8_product_is_followed_like_another() -> None:
    weight, scale = int8.quantize(torch.randn(24, 32), 16)
    by = {"weight_scale": scale, "group_size": 16}
    check("linear", torch.randn(2, 32), weight, None, torch.randn(2, 12), "swiglu", torch.rand(24), **by)


@pytest.mark.parametrize("activation", ["silu", "relu2", "swiglu", "geglu", "gelu", "gelu_pytorch_tanh"])
def test_large_inputs_and_nan_pass_through_an_activation(activation: str) -> None:
    x = torch.tensor([[-200.0], [-30.0], [0.0], [30.0], [200.0], [torch.nan]])
    check("linear", x, torch.ones(4, 1), None, None, activation)
