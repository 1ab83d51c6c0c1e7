"""Triton's norms, embeddings and joins against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.operations import TRITON_BLOCKS
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.quantize import quantize_int8
from tests.support.block_weights import packed
from tests.support.triton_kernels import DTYPES, check, require_triton

require_triton()

dtypes = st.sampled_from(DTYPES)


@settings(max_examples=12)
@given(dtype=dtypes, weight=dtypes, rows=st.integers(0, 5), heads=st.integers(1, 3), size=st.sampled_from([1, 24, 40]))
def test_rms_norm(dtype: torch.dtype, weight: torch.dtype, rows: int, heads: int, size: int) -> None:
    torch.manual_seed(rows)
    wide = torch.randn(rows, (heads + 2) * size).to(dtype)
    x = wide[:, size : (heads + 1) * size].unflatten(1, (heads, size))
    by = torch.randn(size).to(weight)
    check("rms_norm", x, by, 1e-6)
    check("rms_norm", x[:, 0], by, 1e-5)
    check("rms_norm", x, by, 1e-6, 1.0, torch.randn(x.shape).to(weight))


@settings(max_examples=10)
@given(
    dtype=dtypes,
    weight=st.one_of(st.none(), dtypes),
    groups=st.integers(1, 3),
    tokens=st.integers(0, 4),
    before=st.booleans(),
    is_sigmoid=st.booleans(),
)
def test_gated_rms_norm(
    dtype: torch.dtype, weight: torch.dtype | None, groups: int, tokens: int, before: bool, is_sigmoid: bool
) -> None:
    torch.manual_seed(tokens)
    size = groups * 12
    wide = torch.randn(tokens, 2 * size + 3).to(dtype)
    by = None if weight is None else torch.randn(size).to(weight)
    how = (1e-5, None if by is None else 12, before, is_sigmoid)
    check("gated_rms_norm", wide[:, :size], wide[:, size : 2 * size], by, *how)
    gates = torch.randn(tokens, groups, 24).to(dtype)
    check("gated_rms_norm", wide[:, :size], gates[:, :, 12:], None, 1e-5, None, before, is_sigmoid)
    check("gated_rms_norm", wide[:, :size], gates[:, :, 0], None, 1e-5, None, before, is_sigmoid)


@settings(max_examples=6)
@given(dtype=dtypes, rows=st.integers(0, 4), size=st.sampled_from([8, 24]))
def test_layer_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(rows)
    values = [torch.randn(*shape).to(dtype) for shape in ((rows, size), (size,), (size,))]
    check("layer_norm", *values, 1e-6)


@settings(max_examples=8)
@given(
    dtype=dtypes,
    tokens=st.integers(0, 4),
    multiplier=st.sampled_from([1.0, 12.5]),
    group_size=st.sampled_from(["none", None, 8]),
)
def test_embedding(dtype: torch.dtype, tokens: int, multiplier: float, group_size: int | str | None) -> None:
    torch.manual_seed(tokens)
    ids, weight = torch.randint(0, 9, (tokens,)), torch.randn(9, 20)
    if group_size == "none":
        check("embedding", ids, weight.to(dtype), multiplier)
        check("embedding", ids, weight.to(dtype), multiplier, out_dtype=torch.float32)
        return
    assert not isinstance(group_size, str)
    whole, scale = quantize_int8(weight, group_size)
    check("embedding", ids, whole, multiplier, scale, group_size, dtype)


@settings(max_examples=8)
@given(
    dtype=dtypes,
    tokens=st.integers(0, 4),
    multiplier=st.sampled_from([1.0, 12.5]),
    name=st.sampled_from(sorted(TRITON_BLOCKS)),
    blocks=st.integers(1, 3),
)
def test_embedding_in_blocks(dtype: torch.dtype, tokens: int, multiplier: float, name: str, blocks: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = packed(((name, 9),), blocks * BLOCK_FORMATS[name].elements, generator)
    ids = torch.randint(0, 9, (tokens,), generator=generator)
    check("embedding", ids, weight, multiplier, out_dtype=dtype, blocks=((name, 9),))


@settings(max_examples=6)
@given(dtype=dtypes, tokens=st.integers(0, 3), first=st.integers(1, 9), second=st.integers(1, 20))
def test_concat(dtype: torch.dtype, tokens: int, first: int, second: int) -> None:
    wide = torch.arange(float(tokens * (first + second + 2))).view(tokens, first + second + 2).to(dtype)
    check("concat", wide[:, 1 : first + 1], wide[:, first + 1 : first + 1 + second])
    heads = torch.arange(float(tokens * 2 * (first + second))).view(tokens, 2, first + second).to(dtype)
    check("concat", heads[:, :, :first], heads[:, :, first:])


@settings(max_examples=6)
@given(dtype=dtypes, tokens=st.integers(0, 3), size=st.integers(1, 20))
def test_multiply(dtype: torch.dtype, tokens: int, size: int) -> None:
    torch.manual_seed(size)
    wide = torch.randn(tokens, 2 * size + 3).to(dtype)
    check("multiply", wide[:, 1 : size + 1], wide[:, size + 2 : 2 * size + 2])
    check("multiply", wide[:, 1 : size + 1], wide[:, :1])
    check("multiply", wide[:, 1 : size + 1], torch.randn(1, 1))
    check("add", wide[:, 1 : size + 1], wide[:, size + 2 : 2 * size + 2])
    check("add", wide[:, 1 : size + 1], torch.randn(1, size).to(dtype))
    check("clip", wide[:, 1 : size + 1], torch.tensor([-0.3, 0.7]))


@settings(max_examples=6)
@given(
    dtype=dtypes,
    tokens=st.integers(0, 3),
    size=st.integers(1, 20),
    activation=st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]),
)
def test_gated_activation(dtype: torch.dtype, tokens: int, size: int, activation: str) -> None:
    torch.manual_seed(size)
    wide = torch.randn(tokens, 2 * size + 3).to(dtype)
    check("gated_activation", wide[:, 1 : 2 * size + 1], activation)
    if activation == "silu":
        check("gated_activation", 3 * wide[:, 1 : 2 * size + 1], activation, (1.3, 0.9, 0.4))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inject_media(dtype: torch.dtype, add: bool) -> None:
    """Cell 0 holds NaN, which no token of text gets."""
    torch.manual_seed(0)
    media = torch.randn(4, 3, 20).to(dtype)
    media[0] = float("nan")
    check("inject_media", torch.randn(5, 20).to(dtype), torch.tensor([0, 2, 0, 3, 1]), media, 1, add)
