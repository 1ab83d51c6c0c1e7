"""Triton's router and experts against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.operations import GATED, TRITON_BLOCKS
from ostinato.ops.quant import quantize
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from tests.support.block_weights import packed
from tests.support.triton_kernels import DTYPES, check, reference, require_triton, run_both

require_triton()

dtypes = st.sampled_from(DTYPES)


@settings(max_examples=15)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 3, 18]),
    groups=st.sampled_from([(6, 1, 1), (12, 3, 2), (8, 4, 1)]),
    by_sigmoid=st.booleans(),
    normalize=st.booleans(),
)
def test_route(
    dtype: torch.dtype, tokens: int, groups: tuple[int, int, int], by_sigmoid: bool, normalize: bool
) -> None:
    torch.manual_seed(tokens)
    experts, num_groups, top_groups = groups
    x, weight = torch.randn(tokens, 20).to(dtype), torch.randn(experts, 20).to(dtype)
    if by_sigmoid:
        check("route", x, weight, torch.rand(experts), 2, num_groups, top_groups, normalize, 2.5, False, 0.3)
    else:
        bias = torch.randn(experts) if tokens % 2 else None
        scales = torch.randn(experts) if tokens > 1 else None
        check("route", x, weight, None, 2, softmax_over_all=normalize, bias=bias, expert_scales=scales)


def test_of_equal_experts_the_first_are_chosen() -> None:
    check("route", torch.ones(2, 4), torch.ones(6, 4), None, 3)
    check("route", torch.ones(2, 4), torch.ones(6, 4), torch.zeros(6), 3, 3, 2)


def test_tokens_that_are_nan_get_valid_experts_and_disturb_no_others() -> None:
    x = torch.randn(3, 20)
    weight = torch.randn(6, 20)
    right = reference("route")(x, weight, None, 2)
    x[1] = torch.nan
    own, _, _, _ = run_both("route", x, weight, None, 2)
    assert ((own[1, 0] >= 0) & (own[1, 0] < 6)).all()
    torch.testing.assert_close(own[[0, 2]], right[[0, 2]])


@settings(max_examples=12)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 4, 19]),
    top_k=st.integers(1, 3),
    activation=st.sampled_from(["swiglu", "geglu", "relu2"]),
    group_size=st.sampled_from([0, None, 16, 5]),
    has_residual=st.booleans(),
    has_bias=st.booleans(),
)
def test_moe(
    dtype: torch.dtype,
    tokens: int,
    top_k: int,
    activation: str,
    group_size: int | None,
    has_residual: bool,
    has_bias: bool,
) -> None:
    """A `group_size` of 0: the weights are not quantised."""
    torch.manual_seed(tokens + top_k)
    experts, size, inner = 3, 20, 12
    rows = 2 * inner if activation in GATED else inner
    x, residual = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype)
    up, down = torch.randn(experts, rows, size), torch.randn(experts, size, inner)
    choices = reference("route")(x.float(), torch.randn(experts, size), None, top_k)
    given_residual = residual if has_residual else None
    further: dict[str, Any] = {}
    if has_bias:
        further = {"up_bias": torch.randn(experts, rows), "down_bias": torch.randn(experts, size)}
        further["clamp"] = (1.3, 0.9, 0.4) if activation == "swiglu" else None
    if group_size == 0:
        check("moe", x, choices, up.to(dtype), down.to(dtype), activation, given_residual, **further)
        return
    stacks = [quantize.quantize_int8(each.flatten(0, 1), group_size) for each in (up, down)]
    (up, up_scale), (down, down_scale) = (tuple(part.unflatten(0, (experts, -1)) for part in stack) for stack in stacks)
    check("moe", x, choices, up, down, activation, given_residual, up_scale, down_scale, group_size, **further)


@settings(max_examples=8)
@given(
    dtype=dtypes,
    tokens=st.sampled_from([0, 1, 9]),
    name=st.sampled_from(sorted(TRITON_BLOCKS)),
    activation=st.sampled_from(["swiglu", "relu2"]),
)
@pytest.mark.slow
def test_experts_in_blocks(dtype: torch.dtype, tokens: int, name: str, activation: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    experts, size = 3, BLOCK_FORMATS[name].elements
    inner = 2 * size if size <= 128 else size  # in the interpreter a block of 256 takes long
    rows = 2 * inner if activation in GATED else inner
    # Weights have a variance of 1 / inputs at most: larger values would leave float16.
    up, down = (
        packed(((name, experts * each),), of, generator).unflatten(0, (experts, each))
        for each, of in ((rows, size), (size, inner))
    )
    x = torch.randn(tokens, size, generator=generator).to(dtype)
    choices = reference("route")(x.float(), torch.randn(experts, size, generator=generator), None, 2)
    in_blocks = {"up_blocks": ((name, rows),), "down_blocks": ((name, size),)}
    check("moe", x, choices, up, down, activation, None, **in_blocks)


def test_experts_whose_matrices_have_two_formats() -> None:
    """As files of mixed types have them, with other numbers of weights in a block."""
    generator = torch.Generator().manual_seed(0)
    up, down = packed((("Q4_K", 3 * 32),), 256, generator), packed((("Q8_0", 3 * 256),), 32, generator)
    x = torch.randn(2, 256, generator=generator)
    choices = reference("route")(x, torch.randn(3, 256, generator=generator), None, 2)
    in_blocks = {"up_blocks": (("Q4_K", 32),), "down_blocks": (("Q8_0", 256),)}
    check("moe", x, choices, up.unflatten(0, (3, 32)), down.unflatten(0, (3, 256)), "relu2", None, **in_blocks)


def test_padding_tokens_that_are_nan_disturb_no_others() -> None:
    x = torch.randn(4, 20)
    choices = reference("route")(x, torch.randn(3, 20), None, 2)
    weights = torch.randn(3, 12, 20), torch.randn(3, 20, 12)
    right = reference("moe")(x, choices, *weights, "relu2")
    x[1] = torch.nan
    own, _, _, _ = run_both("moe", x, choices, *weights, "relu2")
    torch.testing.assert_close(own[[0, 2, 3]], right[[0, 2, 3]], rtol=1e-5, atol=1e-4)
