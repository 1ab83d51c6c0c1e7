"""Triton's norms, embeddings and joins against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
