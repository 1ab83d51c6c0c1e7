"""Calls of operations that the steps of the benchmarks' models lack.

These are wide heads, keys and values of 8 bits, experts, 8-bit weights, Mamba-1, delta nets and sampling. Their Triton
launches are collected beside those of models (`triton_launches.py`). All tensors are on the device `meta`.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.ops.dispatch import triton_kernel
from ostinato.ops.quant.block_formats import BLOCK_FORMATS
from ostinato.ops.quant.quantize import num_groups

META = torch.device("meta")
TOKENS = (1, 2048)
GROUP_SIZES = (None, 32, 128)
IN_BLOCKS = ("int4_g32", "int4_g128", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Of all that kernels read, the smallest groups, the largest, 8 bits, and GGUF's."""
EXPERTS_IN_BLOCKS = ("int4_g32", "int4_g128", "Q4_K", "Q6_K", "MXFP4")
"""Those that published experts are made of."""
EXPERTS = ((64, 6, 1), (256, 8, 8))
"""Their number, how many a token has, and in how many groups they are."""

HIDDEN, INNER = 2048, 1024
STATE_SIZE = 16

DELTA_HEADS = ((16, 32, 128, 128, False), (30, 30, 96, 192, False), (32, 32, 128, 128, True))
"""Key heads, heads, their key and value channels, and whether each key channel has a decay of its own: of Qwen3-Next,
OLMo-Hybrid and Kimi Linear."""

ATTENTION_HEADS = ((32, 1, 576, None), (32, 32, 224, None), (8, 4, 256, 1024), (64, 8, 64, 128))
"""Query heads, key heads, elements of one and the window: of Kimi Linear's latents, Zamba2, Gemma 3 and gpt-oss."""

HAS_SINKS = (64, 8, 64, 128)
"""The one of these whose heads have sinks."""


def call_operations(dtype: torch.dtype) -> None:
    """Calls each with tokens of `dtype`, for its launches."""
    for tokens in TOKENS:
        x = _empty(tokens, HIDDEN, dtype=dtype)
        for group_size in GROUP_SIZES:
            weight, scale = _quantized((INNER, HIDDEN), group_size)
            triton_kernel("linear")(x, weight, weight_scale=scale, group_size=group_size)
            ids = _empty(tokens, dtype=torch.int64)
            triton_kernel("embedding")(ids, weight, 2.0, scale, group_size, dtype)
        for name in IN_BLOCKS:
            weight, blocks = _in_blocks((INNER, HIDDEN), name), ((name, INNER),)
            triton_kernel("linear")(x, weight, blocks=blocks)
            triton_kernel("embedding")(ids, weight, 2.0, out_dtype=dtype, blocks=blocks)
        for activation, rows in (("relu2", INNER), ("swiglu", 2 * INNER)):
            _call_experts(x, activation, rows)
    for heads in ATTENTION_HEADS:
        _call_attention(dtype, *heads)
    for channels in (1536, 8192):
        for state_dtype in (torch.float32, dtype):
            _call_selective(channels, dtype, state_dtype)
    for heads in DELTA_HEADS:
        _call_delta_nets(dtype, *heads)
    for head_dim in (64, 128):
        _call_int8_cache(dtype, head_dim)
    sample = triton_kernel("sample")
    logits, keys = _empty(8, 151_936, dtype=torch.float32), _empty(8, 2, dtype=torch.int32)
    sample(logits)
    for kept in ((0, 1.0), (5, 1.0), (0, 0.9), (5, 0.9)):
        settings = torch.tensor([[1.0, *kept, 0.0]] * 8, dtype=torch.float64)
        sample(logits, settings, keys)


def _call_int8_cache(dtype: torch.dtype, head_dim: int) -> None:
    """Of prompts and of decode rows, with keys and values of 8 bits."""
    shape = (4096, 16, 8, head_dim)
    caches = [_empty(*shape, dtype=torch.int8) for _ in range(2)]
    scales = [_empty(*shape[:3], dtype=torch.float32) for _ in range(2)]
    for rows, tokens in ((1, 1), (64, 64), (1, 2048)):
        q, k, v = (_empty(tokens, heads, head_dim, dtype=dtype) for heads in (16, 8, 8))
        angles, cells = _empty(2, tokens, head_dim // 2, dtype=torch.float32), _empty(tokens, dtype=torch.int64)
        triton_kernel("rotary")(q, k, v, angles, 1.0, *caches, cells, *scales)
        starts, of_rows = _empty(rows + 1, dtype=torch.int32), _empty(rows, dtype=torch.int32)
        described = (starts, of_rows, of_rows, _empty(rows, 256, dtype=torch.int32))
        triton_kernel("attention")(q, *caches, *described, 0.1, k_scales=scales[0], v_scales=scales[1])


def _call_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    """Decode rows, few and many, with drafts and without, and a prompt."""
    cache = _empty(4096, 16, kv_heads, head_dim, dtype=dtype)
    sinks = _empty(heads, dtype=torch.float32) if (heads, kv_heads, head_dim, window) == HAS_SINKS else None
    for rows, per_row in ((1, 1), (8, 1), (256, 1), (32, 4), (1, 2048)):
        q = _empty(rows * per_row, heads, head_dim, dtype=dtype)
        of_rows = (_empty(rows + 1, dtype=torch.int32), *(_empty(rows, dtype=torch.int32) for _ in range(2)))
        tables = _empty(rows, 512, dtype=torch.int32)
        triton_kernel("attention")(q, cache, cache, *of_rows, tables, 0.1, 0, window, sinks=sinks)


def _call_experts(x: torch.Tensor, activation: str, rows: int) -> None:
    """Experts with `rows` rows of weights inward."""
    route, moe = triton_kernel("route"), triton_kernel("moe")
    for experts, top_k, groups in EXPERTS:
        router, bias = _empty(experts, HIDDEN, dtype=x.dtype), _empty(experts, dtype=torch.float32)
        choices = route(x, router, bias if groups > 1 else None, top_k, groups, max(groups // 2, 1))
    up, down = (experts, rows, HIDDEN), (experts, HIDDEN, INNER)
    moe(x, choices, _empty(*up, dtype=x.dtype), _empty(*down, dtype=x.dtype), activation, x)
    for group_size in GROUP_SIZES:
        (up_weight, up_scale), (down_weight, down_scale) = (_quantized(each, group_size) for each in (up, down))
        moe(x, choices, up_weight, down_weight, activation, x, up_scale, down_scale, group_size)
    for name in EXPERTS_IN_BLOCKS:
        further: dict[str, Any] = {"up_blocks": ((name, rows),), "down_blocks": ((name, HIDDEN),)}
        if (name, activation) == ("MXFP4", "swiglu"):  # as gpt-oss has them
            biases = (_empty(experts, size, dtype=torch.float32) for size in (rows, HIDDEN))
            further |= {**dict(zip(("up_bias", "down_bias"), biases, strict=True)), "clamp": (1.702, 7.0, 1.0)}
        moe(x, choices, _in_blocks(up, name), _in_blocks(down, name), activation, x, **further)


def _call_selective(channels: int, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Decode rows with drafts and without, and prompts with a checkpoint and without."""
    noise = None if state_dtype == torch.float32 else 3
    states = _empty(1024, channels, STATE_SIZE, dtype=state_dtype)
    for rows, tokens in ((1, 1), (64, 1), (256, 4)):
        inputs, slots = _selective_inputs(rows * tokens, channels, dtype), _empty(rows, dtype=torch.int32)
        writes = _empty(rows, tokens, dtype=torch.int32)
        triton_kernel("selective_update")(*inputs, states, slots, writes, slots, noise)
    inputs, slots = _selective_inputs(2048, channels, dtype), _empty(2, dtype=torch.int32)
    starts = _empty(3, dtype=torch.int32)
    for checkpoints in ((), ((0, 256, 1),)):
        triton_kernel("selective_scan")(*inputs, states, starts, slots, slots, slots, checkpoints, noise)


def _selective_inputs(tokens: int, channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, dt, A_log, B, C, D and dt_bias."""
    x, b = _empty(tokens, channels, dtype=dtype), _empty(tokens, STATE_SIZE, dtype=dtype)
    per_channel = _empty(channels, dtype=torch.float32)
    rates = _empty(channels, STATE_SIZE, dtype=torch.float32)
    return x, x, rates, b, b, per_channel, per_channel


def _call_delta_nets(
    dtype: torch.dtype, key_heads: int, heads: int, key_dim: int, value_dim: int, per_channel: bool
) -> None:
    """Decode rows with drafts and without, and prompts with a checkpoint and without."""
    of_token = (heads, key_dim) if per_channel else (heads,)
    states = _empty(9, heads, key_dim, value_dim, dtype=torch.float32)

    def inputs(tokens: int) -> tuple[Any, ...]:
        queries, keys = (_empty(tokens, key_heads, key_dim, dtype=dtype) for _ in range(2))
        values, gates = _empty(tokens, heads, value_dim, dtype=dtype), _empty(tokens, *of_token, dtype=dtype)
        betas, rates = _empty(tokens, heads, dtype=dtype), _empty(heads, dtype=torch.float32)
        biases = _empty(*of_token, dtype=torch.float32)
        return queries, keys, values, gates, betas, rates, biases, 0.0, 1.0, False, states

    for rows, per_row in ((8, 1), (256, 1), (32, 4)):
        slots = _empty(rows, dtype=torch.int32), _empty(rows, per_row, dtype=torch.int32)
        triton_kernel("delta_update")(*inputs(rows * per_row), *slots)
    slots = _empty(2, dtype=torch.int32)
    for checkpoints in ((), ((0, 256, 1),)):
        rows = _empty(3, dtype=torch.int32), slots, slots, slots
        triton_kernel("delta_scan")(*inputs(2048), *rows, checkpoints)


def _quantized(shape: tuple[int, ...], group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    scales = shape[:-1] if group_size is None else (*shape[:-1], num_groups(shape[-1], group_size))
    return _empty(*shape, dtype=torch.int8), _empty(*scales, dtype=torch.float32)


def _in_blocks(shape: tuple[int, ...], name: str) -> torch.Tensor:
    return _empty(*shape[:-1], BLOCK_FORMATS[name].row_bytes(shape[-1]), dtype=torch.uint8)


def _empty(*shape: int, **of: Any) -> torch.Tensor:
    return torch.empty(shape, device=META, **of)
