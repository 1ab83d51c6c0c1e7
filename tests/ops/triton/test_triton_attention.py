"""Triton's attention against the reference: ragged rows, drafts' padding, segments, and NaN where nobody may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.ops.launch_tables import attention as launches
from ostinato.ops.quant.quantize import quantize_int8
from tests.support.triton_kernels import DTYPES, check, require_triton

require_triton()

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    """`new` tokens from position `start` on, and `padding` tokens that the row owns behind them."""

    start: int
    new: int
    padding: int = 0

    @property
    def kv_len(self) -> int:
        return self.start + self.new if self.new else 0


def attend(
    rows: Sequence[Row],
    dtype: torch.dtype,
    *,
    kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 16,
    first_key: int = 0,
    window: int | None = None,
    behind: int = 0,
    spare_blocks: int = 1,
    int8: bool = False,
    has_sinks: bool = False,
    softcap: float | None = None,
    image: int = 0,
) -> torch.Tensor:
    """Compares with the reference; `behind` tokens follow the last row. All that no token may read is NaN: the null
    block, other blocks, cells behind a row's context, before `first_key` and before its tokens' windows, and the
    queries of padding. Of keys and values that are integers the scales are NaN there."""
    torch.manual_seed(len(rows) + head_dim)
    heads = kv_heads * group
    needed = [-(-row.kv_len // BLOCK_SIZE) for row in rows]
    order = (torch.randperm(sum(needed)) + 1).int()
    tables = torch.zeros(len(rows), max(needed) + spare_blocks, dtype=torch.int32)
    cache = torch.full((2, sum(needed) + 1, BLOCK_SIZE, kv_heads, head_dim), torch.nan, dtype=dtype)
    starts, queries = [0], []
    for i, row in enumerate(rows):
        tables[i, : needed[i]] = order[sum(needed[:i]) : sum(needed[: i + 1])]
        seen = first_key if window is None else max(first_key, max(row.start, first_key) - window + 1)
        position = torch.arange(min(seen, row.kv_len), row.kv_len)
        cells = tables[i].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        cache.flatten(1, 2)[:, cells] = torch.randn(2, len(position), kv_heads, head_dim).to(dtype)
        tables[i, : min(seen, row.kv_len) // BLOCK_SIZE] = 0
        queries += [torch.randn(row.new, heads, head_dim), torch.full((row.padding, heads, head_dim), torch.nan)]
        starts.append(starts[-1] + row.new + row.padding)
    queries.append(torch.full((behind, heads, head_dim), torch.nan))
    q = torch.cat(queries).to(dtype)
    q = torch.cat((q, q), dim=1)[:, :heads]  # a part of a wider projection
    row_starts, start_positions, kv_lens = (
        torch.tensor(each, dtype=torch.int32)
        for each in (starts, [row.start for row in rows], [row.kv_len for row in rows])
    )
    described = (row_starts, start_positions, kv_lens, tables, 0.3, first_key, window)
    # The first tokens of each row, from its start on, see each other.
    own = [torch.arange(row.start, row.start + row.new) for row in rows]
    last = [each.clamp(min=int(each[0]) + min(image, len(each)) - 1) if len(each) else each for each in own]
    padded = [torch.cat((each, torch.zeros(row.padding))) for each, row in zip(last, rows, strict=True)]
    last_seen = torch.cat((*padded, torch.zeros(behind))).int() if image else None
    others = {
        "last_seen": last_seen,
        "sinks": torch.linspace(4.0, -3.0, heads) if has_sinks else None,
        "softcap": softcap,
    }
    if int8:
        whole, scales = quantize_int8(cache.nan_to_num(50.0).flatten(0, -2), None)
        scales = scales.view(cache.shape[:-1]).masked_fill(cache.isnan().any(-1), torch.nan)
        out = check("attention", q, *whole.view(cache.shape), *described, *scales, **others)
    else:
        out = check("attention", q, *cache, *described, **others)
    assert out.isfinite().all()
    return out


ROWS = st.builds(Row, start=st.integers(0, 40), new=st.integers(0, 20), padding=st.integers(0, 3))


@settings(max_examples=20)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([5, 16, 20]),
    first_key=st.sampled_from([0, 1, 17]),
    window=st.sampled_from([None, 1, 2, 15, 16, 17, 33, 60]),
    behind=st.integers(0, 3),
    int8=st.booleans(),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([None, 0.8]),
    image=st.sampled_from([0, 3, 12]),
)
@example(
    rows=[Row(0, 0)], dtype=torch.float32, kv_heads=1, group=1, head_dim=16, first_key=0, window=None, behind=2,
    int8=False, has_sinks=True, softcap=None, image=0,
)  # fmt: skip
@pytest.mark.slow
def test_prompts_and_decode_rows_side_by_side(
    rows: list[Row],
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    head_dim: int,
    first_key: int,
    window: int | None,
    behind: int,
    int8: bool,
    has_sinks: bool,
    softcap: float | None,
    image: int,
) -> None:
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "window": window, "int8": int8}
    attend(rows, dtype, first_key=first_key, behind=behind, has_sinks=has_sinks, softcap=softcap, image=image, **sizes)


@settings(max_examples=10)
@given(
    starts=st.lists(st.sampled_from([0, 1, 15, 16, 127, 128, 300]), min_size=1, max_size=2),
    drafts=st.integers(0, 2),
    given_drafts=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    first_key=st.sampled_from([0, 17, 130]),
    window=st.sampled_from([None, 1, 16, 40, 256, 300]),
    int8=st.booleans(),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([None, 0.8]),
)
def test_decode_rows_with_drafts_whose_keys_are_cut_into_segments(
    starts: list[int],
    drafts: int,
    given_drafts: int,
    dtype: torch.dtype,
    first_key: int,
    window: int | None,
    int8: bool,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    new = 1 + min(drafts, given_drafts)
    rows = [Row(start, new, 1 + drafts - new) for start in starts]
    attend(rows, dtype, group=2, first_key=first_key, window=window, spare_blocks=24, int8=int8,
           has_sinks=has_sinks, softcap=softcap)  # fmt: skip


def test_a_row_without_a_context_gives_zeros_beside_others() -> None:
    out = attend([Row(0, 0, 1), Row(200, 1), Row(0, 0, 1)], torch.float32, spare_blocks=24)
    assert [bool(each.any()) for each in out] == [False, True, False]


def test_few_rows_cut_their_keys_into_segments_and_many_do_not() -> None:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16, "max_context": 8192}

    def segments(rows: int, tokens: int) -> int:
        found = launches.attention_launches(tokens=tokens, rows=rows, element_bytes=2, capability=90, **sizes)
        assert len(found) == (1 if launches.segments_of(found) == 1 else 2)
        return launches.segments_of(found)

    assert [segments(rows, rows) for rows in (1, 4, 8, 32, 256)] == [16, 16, 8, 2, 1]
    assert [segments(rows, 4 * rows) for rows in (1, 256)] == [16, 1]
    assert segments(1, 2048) == 1
    sizes |= {"window": 512}
    assert [segments(rows, rows) for rows in (1, 32, 256)] == [4, 2, 1]


@pytest.mark.parametrize("group", [24, 71])
def test_the_query_heads_of_a_key_head_share_a_tile_however_many_they_are(group: int) -> None:
    attend([Row(20, 2), Row(3, 1)], torch.float32, group=group)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_head_has_behind_its_first_512_elements_is_an_operand_of_its_own(dtype: torch.dtype) -> None:
    """As in latents. The second batch cuts its keys into segments."""
    attend([Row(0, 2), Row(17, 1)], dtype, group=3, head_dim=576)
    attend([Row(150, 1, 1), Row(0, 0, 2)], dtype, group=3, head_dim=530, spare_blocks=24)


def test_heads_wider_than_a_power_of_two_are_one_operand_up_to_512_elements() -> None:
    def widths(head_dim: int) -> tuple[int, int]:
        sizes = {"tokens": 1, "rows": 1, "num_heads": 8, "num_kv_heads": 1, "max_context": 64, "block_size": 16}
        (launch,) = launches.attention_launches(**sizes, head_dim=head_dim, element_bytes=2, capability=90)
        return launch.blocks["WIDTH"], launch.blocks["REST"]

    assert [widths(size) for size in (5, 80, 224, 320, 576)] == [(16, 0), (128, 0), (256, 0), (512, 0), (512, 64)]
    assert launches.MAX_HEAD_DIM == 576
