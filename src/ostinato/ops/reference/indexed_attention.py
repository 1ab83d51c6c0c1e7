"""References of attention to the blocks of keys that an indexer selects.

`indexed_attention` selects and attends (Qwen4). `select_blocks` and `selected_attention` are two operations, since
several layers may attend to the blocks that one of them selects (GLM-5.3).
"""

from __future__ import annotations

import math

import torch

from ostinato.ops.reference.attention import _attend, _masked, _read
from ostinato.ops.reference.pointwise import rms_norm
from ostinato.ops.reference.rotary import rotary_angles, rotate
from ostinato.ops.sizes import INDEX_SLAB


def indexed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_cache: torch.Tensor,
    index_norm: torch.Tensor,
    eps: float,
    frequencies: torch.Tensor,
    scaling: float,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    budget: int,
    ratio: int,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    index_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each token to the blocks of `ratio` positions that it selects, and to its last, incomplete block.

    A block's key is the mean of its positions' `index_cache` [blocks, block_size, 1, index_dim], normed by 1 +
    `index_norm`, and rotated to the block's first position by `frequencies` and `scaling` (`rotary_angles`). Its score
    for a token is the sum over heads of relu(query . key), for `index_q` [tokens, index_heads, index_dim], which are
    normed and rotated. A token selects the `budget / ratio` complete blocks of the highest score, of equal ones the
    first. With `index_scales` [blocks, block_size, 1] float32, as with `k_scales` and `v_scales`, the caches are int8.
    All else is as in `attention`. -> like `q`.
    """
    out = torch.zeros_like(q)
    block_size, most = k_cache.shape[1], budget // ratio
    starts, positions = row_starts.tolist(), start_positions.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        first = positions[row]
        if kv_len <= first or starts[row] == starts[row + 1]:
            continue
        here = slice(starts[row], starts[row] + kv_len - first)
        blocks = block_tables[row, : -(-kv_len // block_size)]
        keys, values = (
            _read(cache, scales, blocks, slice(kv_len)) for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
        )
        queries = q.to(keys.dtype)
        complete = kv_len // ratio
        if complete <= most:  # Every token selects all of its blocks.
            out[here] = _attend(queries[here], keys, values, scale, None, None, None, None)
            continue
        [raw] = _read(index_cache, index_scales, blocks, slice(complete * ratio))
        pooled = raw.view(complete, ratio, -1).float().mean(dim=1).to(index_q.dtype)
        at = torch.arange(complete, device=q.device)
        angles = rotary_angles(at * ratio, frequencies, scaling)
        index_keys = rotate(rms_norm(pooled, index_norm, eps, 1.0)[:, None], angles)[:, 0].float()
        position = torch.arange(kv_len, device=q.device)
        for begin in range(here.start, here.stop, INDEX_SLAB):
            end = min(begin + INDEX_SLAB, here.stop)
            at_token = position[first + begin - here.start : first + end - here.start, None]
            is_complete = at < (at_token + 1) // ratio
            scores = torch.relu(index_q[begin:end].float() @ index_keys.T).sum(dim=1) / math.sqrt(index_keys.shape[1])
            order = scores.masked_fill_(~is_complete, -torch.inf).sort(dim=1, descending=True, stable=True).indices
            is_selected = torch.zeros_like(is_complete).scatter_(1, order[:, :most], True) & is_complete
            mask = position >= (at_token + 1) // ratio * ratio
            mask[:, : complete * ratio] |= is_selected.repeat_interleave(ratio, dim=1, output_size=complete * ratio)
            out[begin:end] = _masked(queries[begin:end], keys, values, mask & (position <= at_token), scale)
    return out


def select_blocks(
    index_q: torch.Tensor,
    head_weights: torch.Tensor,
    index_cache: torch.Tensor,
    gate_bias: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    budget: int,
    ratio: int,
) -> torch.Tensor:
    """Select for each token the `budget / ratio` complete blocks of `ratio` positions with the highest scores.

    `index_cache` [blocks, block_size, 1, 2 * index_dim] has a key for each position, then its gates. The key of a block
    is the mean of its positions' keys, weighted for each element by the softmax over the block of the gates plus
    `gate_bias` [ratio, index_dim]. Its score for a token is the sum over heads of weight * relu(query . key), for
    `index_q` [tokens, index_heads, index_dim] and `head_weights` [tokens, index_heads]. Of equal scores, the first
    block counts. Blocks begin at multiples of `ratio` from the start of the request. -> [tokens, budget / ratio] int32:
    numbers of blocks, and -1 where there are fewer, and for padding.
    """
    most, block_size = budget // ratio, index_cache.shape[1]
    selected = torch.full((index_q.shape[0], most), -1, dtype=torch.int32, device=index_q.device)
    starts, positions = row_starts.tolist(), start_positions.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        first, complete = positions[row], kv_len // ratio
        if kv_len <= first or starts[row] == starts[row + 1] or not complete:
            continue
        here = slice(starts[row], starts[row] + kv_len - first)
        at = torch.arange(complete, device=index_q.device)
        counts = torch.arange(first + 1, kv_len + 1, device=index_q.device) // ratio
        if complete <= most:  # Every token selects all of its blocks.
            selected[here, :complete] = torch.where(at < counts[:, None], at, -1).int()
            continue
        tables = block_tables[row, : -(-complete * ratio // block_size)]
        [entries] = _read(index_cache, None, tables, slice(complete * ratio))
        keys, gates = entries.view(complete, ratio, -1).chunk(2, dim=-1)
        shares = (gates.float() + gate_bias.float()).softmax(dim=1).to(keys.dtype)
        pooled = (shares * keys).sum(dim=1).float()
        for begin in range(here.start, here.stop, INDEX_SLAB):
            end = min(begin + INDEX_SLAB, here.stop)
            is_complete = at < counts[begin - here.start : end - here.start, None]
            of_heads = torch.relu(index_q[begin:end].float() @ pooled.T)
            scores = (head_weights[begin:end, None].float() @ of_heads)[:, 0]
            order = scores.masked_fill_(~is_complete, -torch.inf).sort(dim=1, descending=True, stable=True).indices
            order = order[:, :most]
            selected[begin:end] = torch.where(is_complete.gather(1, order), order, -1).int()
    return selected


def selected_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    selected: torch.Tensor,
    row_starts: torch.Tensor,
    start_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    ratio: int,
    has_tail: bool,
) -> torch.Tensor:
    """Attend from each token to its blocks of `ratio` positions in `selected`, the result of `select_blocks`.

    If it `has_tail`, a token also attends to the positions of the incomplete block that it is in, its own included. A
    token that sees no position gives zeros. All else is as in `attention`. -> like `q`.
    """
    out = torch.zeros_like(q)
    block_size, most = k_cache.shape[1], selected.shape[1]
    starts, positions = row_starts.tolist(), start_positions.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        first, complete = positions[row], kv_len // ratio
        if kv_len <= first or starts[row] == starts[row + 1]:
            continue
        here = slice(starts[row], starts[row] + kv_len - first)
        tables = block_tables[row, : -(-kv_len // block_size)]
        keys, values = (_read(cache, None, tables, slice(kv_len)) for cache in (k_cache, v_cache))
        if has_tail and complete <= most:  # Every token sees all positions up to its own.
            out[here] = _attend(q[here], keys, values, scale, None, None, None, None)
            continue
        position = torch.arange(kv_len, device=q.device)
        for begin in range(here.start, here.stop, INDEX_SLAB):
            end = min(begin + INDEX_SLAB, here.stop)
            at_token = position[first + begin - here.start : first + end - here.start, None]
            blocks = selected[begin:end].long()
            is_selected = torch.zeros((end - begin, complete + 1), dtype=torch.bool, device=q.device)
            is_selected = is_selected.scatter_(1, torch.where(blocks < 0, complete, blocks), True)[:, :complete]
            mask = (position >= (at_token + 1) // ratio * ratio) & (position <= at_token) & has_tail
            mask[:, : complete * ratio] |= is_selected.repeat_interleave(ratio, dim=1, output_size=complete * ratio)
            attended = _masked(q[begin:end], keys, values, mask, scale)
            out[begin:end] = torch.where(mask.any(dim=1)[:, None, None], attended, 0)
    return out
