"""encoder_attention: attention of a vision encoder, in which every patch of an image sees all patches of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F


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
