"""Triton's attention of vision encoders against the reference."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.triton_kernels import DTYPES, check, require_triton

require_triton()


@settings(max_examples=12)
@given(
    dtype=st.sampled_from(DTYPES),
    segments=st.lists(st.sampled_from([0, 1, 5, 33, 70]), min_size=1, max_size=3),
    padding=st.integers(0, 2),
    heads=st.integers(1, 2),
    head_dim=st.sampled_from([5, 16, 24]),
)
@example(dtype=torch.float32, segments=[0], padding=1, heads=1, head_dim=16)
def test_patches_see_their_own_segment_and_padding_gives_zeros(
    dtype: torch.dtype, segments: list[int], padding: int, heads: int, head_dim: int
) -> None:
    torch.manual_seed(len(segments))
    patches = sum(segments)
    parts = torch.randn(patches + padding, 3 * heads, head_dim).to(dtype)
    parts[patches:] = torch.nan
    starts = torch.tensor([0, *accumulate(segments)], dtype=torch.int32)
    out = check("encoder_attention", *parts.split(heads, dim=1), starts)
    assert out.isfinite().all()
