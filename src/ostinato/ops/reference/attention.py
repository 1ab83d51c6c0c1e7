"""References of `attention` and `encoder_attention`.

`attention` is causal, over paged keys and values, for decode rows and prefill rows alike. In `encoder_attention`, that
of a vision encoder, every patch of an image sees all patches of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ostinato.ops.sizes import ATTENTION_SLAB


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    first_key: int = 0,
    window: int | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    last_seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each token to its row's whole context, whose keys and values are all in the cache.

    The cache includes the keys and values of the step's own tokens. With a `window` (at least 1) a token sees only the
    last `window` positions, its own included.

    `q` [tokens, heads, head_dim]; `k_cache`, `v_cache` [blocks, block_size, kv_heads, head_dim]. Row r owns the tokens
    `row_starts[r]:row_starts[r + 1]`, at positions `start_positions[r]` to `kv_lens[r] - 1`. Tokens beyond them are
    padding and give zeros, as does a whole row with a `kv_len` of 0. `block_tables` [rows, max_blocks]. Keys before
    position `first_key` are left out. With `k_scales`, `v_scales` [blocks, block_size, kv_heads] float32 the caches are
    int8: a token's head times its scale is a key or a value, and the arithmetic after that is in float32. `sinks`
    [heads] float32 are one more score of each head's softmax, without a value (gpt-oss): weights then add up to less
    than 1. With a `softcap` c a score s is c tanh(s / c) before the softmax (Gemma 2, arXiv 2408.00118); sinks are not
    capped. `last_seen` [tokens] int32 is the last position that each token sees, if that is not its own: the end of
    its image, whose tokens are all in the step. It never falls within a row. -> [tokens, heads, head_dim].

    Only the positions that a token of the row sees are read. The contents of other positions do not matter, nor do the
    entries of `block_tables` for blocks that no token sees.
    """
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    starts, positions = row_starts.tolist(), start_positions.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        first = max(positions[row], first_key)
        if kv_len <= first or starts[row] == starts[row + 1]:
            continue
        start, end = starts[row] + first - positions[row], starts[row] + kv_len - positions[row]
        seen = first_key if window is None else max(first_key, first - window + 1)
        skipped = seen // block_size
        blocks = block_tables[row, skipped : -(-kv_len // block_size)]
        here = slice(seen - skipped * block_size, kv_len - skipped * block_size)
        keys, values = (
            _read(cache, scales, blocks, here) for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
        )
        until = None if last_seen is None else last_seen[start:end].long() - seen
        out[start:end] = _attend(q[start:end].to(keys.dtype), keys, values, scale, window, sinks, softcap, until)
    return out


def _read(cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, here: slice) -> torch.Tensor:
    """Return the positions `here` of the concatenated `blocks` of a cache, [kv_heads, length, head_dim]."""
    found = cache.index_select(0, blocks).flatten(0, 1)[here]
    if scales is not None:
        found = found.float().mul_(scales.index_select(0, blocks).flatten(0, 1)[here].unsqueeze(-1))
    return found.transpose(0, 1)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    until: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from `q` [new, heads, head_dim], the last tokens of `keys`, `values` [kv_heads, length, head_dim].

    The keys begin with the first one that the first token sees. A token sees those up to its own, or to `until` [new]
    int64, the index of a key, if that is later. -> like `q`.
    """
    new, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    is_plain = sinks is None and softcap is None and until is None
    if new == 1 and is_plain:
        # One token sees every key: the query heads of a group are just more queries of their key head.
        grouped = q.view(1, kv_heads, heads // kv_heads, head_dim)
        out = F.scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0), scale=scale)
        return out.view(1, heads, head_dim)
    if new == length and (window is None or window >= length) and is_plain:
        return _masked(q, keys, values, None, scale)
    position = torch.arange(length, device=q.device)
    last = position[length - new :] if until is None else torch.maximum(position[length - new :], until)
    out = torch.empty_like(q)
    for begin in range(0, new, ATTENTION_SLAB):
        end = min(begin + ATTENTION_SLAB, new)
        first, seen = length - new + begin, length - new + end if until is None else int(last[end - 1]) + 1
        here = slice(0 if window is None else max(0, first - window + 1), seen)
        mask = position[here] <= last[begin:end, None]
        if window is not None:
            mask &= position[here] > position[first : first + end - begin, None] - window
        part = q[begin:end], keys[:, here], values[:, here]
        if softcap is not None:
            out[begin:end] = _capped(*part, mask, scale, sinks, softcap)
        else:
            out[begin:end] = _masked(*part, mask, scale) if sinks is None else _with_sinks(*part, mask, scale, sinks)
    return out


def _masked(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attend like `_attend` with a `mask` [new, length] that is true where a token sees a key.

    Without a mask, each token sees the keys up to its own. A mask of floats [heads, new, length] is added to scores.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[0],
    )
    return out.squeeze(0).transpose(0, 1)


def _with_sinks(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """Attend like `_masked`, with one more key: its scores are the `sinks` [heads], and its value is 0."""
    keys, values = (F.pad(each, (0, 0, 0, 1)) for each in (keys, values))
    scores = torch.zeros((len(sinks), *mask.shape), device=q.device).masked_fill_(~mask, -torch.inf)
    of_sinks = sinks[:, None, None].expand(-1, len(q), 1)
    return _masked(q, keys, values, torch.cat((scores, of_sinks), dim=-1), scale)


def _capped(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Attend like `_masked` with capped scores, in float32."""
    new, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    # The query heads of a group are more queries of their key head.
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, head_dim).float()
    scores = (grouped @ keys.float().transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap)
    scores = scores.view(heads, new, length).masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, new, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[:, :, :length]
    out = weights.reshape(kv_heads, -1, length) @ values.float()
    return out.view(heads, new, head_dim).transpose(0, 1).to(q.dtype)


def encoder_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v within each segment.

    `q`, `k`, `v` [patches, heads, head_dim]; `starts` [segments + 1] int32, ascending: segment s owns the patches
    `starts[s]:starts[s + 1]`, which may be none. -> [patches, heads, head_dim], zeros for patches in no segment; no
    patch sees their keys and values.
    """
    if q.is_cuda:
        return of_all_segments(q, k, v, starts)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for begin, end in pairwise(starts.tolist()):
        if begin < end:
            out[begin:end] = _attend_image(q[begin:end], k[begin:end], v[begin:end], None)
    return out


def of_all_segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Compute `encoder_attention` without reading `starts` on the host, so that a CUDA graph can hold it."""
    patch = torch.arange(q.shape[0], dtype=starts.dtype, device=q.device)
    in_segment = (patch < starts[-1])[:, None, None]
    if q.is_cuda and q.dtype != torch.float32:
        # It follows the documentation and has not run on a GPU. It reads no key after the last segment.
        from torch.nn.attention.varlen import varlen_attn  # It needs a GPU, and is slow to import.

        longest = len(patch)  # No segment has more than all patches.
        out: Any = varlen_attn(q, k, v, starts, starts, longest, longest)
    else:
        segment = torch.searchsorted(starts, patch, right=True)
        seen = segment[:, None] == segment
        q, k, v = (torch.where(in_segment, each, 0) for each in (q, k, v))
        out = _attend_image(q, k, v, seen)
    return torch.where(in_segment, out, 0)


def _attend_image(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend among patches, [patches, heads, head_dim] each.

    `mask` [patches, patches] is true where one patch sees another; None means everywhere.
    """
    heads_first = [each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)]
    out = F.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2], attn_mask=mask)
    return out.squeeze(0).transpose(0, 1)
