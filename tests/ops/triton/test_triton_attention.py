"""The Triton attention against the reference, in Triton's interpreter."""
from __future__ import annotations
import os
os.environ["TRITON_INTERPRET"] = "1"
import pytest, torch
from hypothesis import given, settings, strategies as st
from ostinato.ops import attention as op
from ostinato.ops.triton import attention as fast
from tests.ops.test_native_attention import Batch, Context, Row, TOLERANCE

@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.builds(Row, start=st.integers(0, 150), new=st.integers(0, 20), padding=st.integers(0,3)), min_size=1, max_size=3),
  group=st.sampled_from([1,3,4]), kv=st.sampled_from([1,2]), dim=st.sampled_from([16, 20]), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), first=st.sampled_from([0, 1, 17]), behind=st.integers(0,3), decode=st.booleans())
def test_it(rows, group, kv, dim, dtype, first, behind, decode):
    if decode:
        rows = [Row(r.start, r.new and 1, r.padding and 1) for r in rows]
    ctx = [(Context(r.start + r.new, group*kv, kv, dim, dtype, i), r) for i, r in enumerate(rows)]
    b = Batch(ctx, 16, first)
    q = torch.cat([b.q, torch.full((behind, *b.q.shape[1:]), torch.nan, dtype=dtype)])
    starts = torch.tensor([r.start for r in rows], dtype=torch.int32)
    lens = torch.tensor([r.start + r.new for r in rows], dtype=torch.int32)
    tables = [v for k, v in vars(b).items() if 'tables' in k][0]
    args = (q, b.k_cache, b.v_cache, b.row_starts, starts, lens, tables, 0.3, first)
    want = op.reference(*args)
    got = fast.attention(*args)
    assert torch.isfinite(got).all()
    s = max(1.0, want.abs().max().item() if want.numel() else 1)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * s)
