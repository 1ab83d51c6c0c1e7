"""References of the rotary position embedding (Su et al. 2021): angles, rotation, and the write to the cache.

`rotary_angles` computes the angles of each token's heads once for all layers. `axial_angles` takes positions with
several axes: text with images in time, height and width (M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1), and patches
in rows and columns. `rotary` rotates queries and keys, and writes keys and values into the cache; `rotate` rotates
heads that are not cached. Both use the half-split layout of Hugging Face checkpoints.
"""

from __future__ import annotations

import torch

from ostinato.ops.quant.quantize import quantize_int8


def axial_angles(
    positions: torch.Tensor, axes: torch.Tensor, frequencies: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return cosine and sine of each angle, times `scaling`.

    Angle i is the token's position `axes[i]` times `frequencies[i]`. `positions` [tokens, axes] int64, `axes` [half]
    int64, `frequencies` [half] float32 -> [2, tokens, half] float32, the cosines first.
    """
    angles = positions.index_select(1, axes).float() * frequencies
    return torch.stack((angles.cos(), angles.sin())).mul_(scaling)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate element i of every head of `x` with element `half + i` by the angle of frequency i.

    `x` [tokens, heads, head_dim]; elements from `2 * half` on pass through. `angles` [2, tokens, half]
    float32, as returned by `rotary_angles` and `axial_angles`. -> like `x`.
    """
    half = angles.shape[-1]
    cos, sin = angles.unsqueeze(2)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    angles: torch.Tensor | None,
    key_multiplier: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    kv_cells: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to the cells `kv_cells` of the cache.

    `q` [tokens, heads, head_dim], with no heads if only keys and values count; `k`, `v` [tokens, kv_heads, head_dim];
    `angles` [2, tokens, half] float32, as returned by `rotary_angles`, or None for attention without
    positions. The first `2 * half` elements of every head are rotated, the rest pass through; keys are multiplied by
    `key_multiplier` before. `k_cache`, `v_cache` [blocks, block_size, kv_heads, head_dim]; `kv_cells` [tokens] int64:
    block id * block_size + offset, 0 for padding. Without `v` and `v_cache` only keys are written, and values are a
    part of them. With `k_scales`, `v_scales` [blocks, block_size, kv_heads] float32 the caches are int8, and each head
    of a token is rounded like a row of weights (`ops/quant/quantize.py`), after its rotation. -> the rotated queries,
    in the dtype of `q`; without angles `q` itself.
    """
    if key_multiplier != 1.0:
        k = k * key_multiplier
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    _write(k, k_cache, k_scales, kv_cells)
    if v is not None and v_cache is not None:
        _write(v, v_cache, v_scales, kv_cells)
    return q


def _write(heads: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, kv_cells: torch.Tensor) -> None:
    if scales is not None:
        whole, scale = quantize_int8(heads.flatten(0, 1), None)
        heads = whole.view(heads.shape)
        scales.flatten(0, 1).index_copy_(0, kv_cells, scale.view(heads.shape[:2]))
    cache.flatten(0, 1).index_copy_(0, kv_cells, heads)


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return cosine and sine of position times frequency, each times `scaling`.

    `positions` [tokens] int64, `frequencies` [half] float32 -> [2, tokens, half] float32, the cosines first.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return torch.stack((angles.cos(), angles.sin())).mul_(scaling)
