"""The native indexed attention: against its formula in float64, and the same bits for a token in any batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant.quantize import quantize_int8
from ostinato.ops.sizes import INDEX_GROUP_TOKENS
from tests.support.examples import examples
from tests.support.native_kernels import checked_kernel, int32, same_bits, spaced
from tests.support.native_sets import SETS

pytestmark = pytest.mark.parametrize("isa", SETS)

few = examples(30)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of the largest value: a rounding of weights and one of results."""
SCALE, EPS = 0.3, 1e-5
FREQUENCIES = torch.tensor([1.0, 0.1])


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    index_heads: int = 5
    index_dim: int = 20
    ratio: int = 3
    selected: int = 4
    """Blocks that a token selects."""
    block_size: int = 16


@dataclass(frozen=True)
class Row:
    """`new` tokens from position `start` on, and `padding` tokens that the row owns behind them."""

    start: int
    new: int
    padding: int = 0


class Text:
    """One text's queries, keys and values at every position, with what the indexer has of them."""

    def __init__(self, length: int, sizes: Sizes, dtype: torch.dtype, seed: int, int8: bool = False) -> None:
        self.sizes, self.dtype = sizes, dtype
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(length, *shape, generator=generator).to(dtype)

        self.q, self.index_q = normal(sizes.heads, sizes.head_dim), normal(sizes.index_heads, sizes.index_dim)
        plain = (
            normal(sizes.kv_heads, sizes.head_dim),
            normal(sizes.kv_heads, sizes.head_dim),
            normal(1, sizes.index_dim),
        )
        self.kept = [self._kept(values) if int8 else (values, None) for values in plain]
        """Keys, values and keys of the indexer, as they are cached, and the scale of each token's head."""

    @staticmethod
    def _kept(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        integers, scales = quantize_int8(values.flatten(0, 1), None)
        return integers.view(values.shape), scales.view(values.shape[:2])

    def read(self) -> list[torch.Tensor]:
        """The same in float64."""
        return [x.double() if scales is None else x.double() * scales.double()[..., None] for x, scales in self.kept]

    def scores(self, norm: torch.Tensor, position: int) -> torch.Tensor:
        """The score of each complete block for a token, in float64; keys are rounded where they are kept."""
        raw, ratio = self.read()[2][:, 0], self.sizes.ratio
        complete = (position + 1) // ratio
        keys = raw[: complete * ratio].view(complete, ratio, raw.shape[1]).mean(dim=1).to(self.dtype).double()
        keys = keys / torch.sqrt((keys * keys).mean(dim=1, keepdim=True) + EPS) * (1 + norm.double())
        keys = keys.to(self.dtype).double()
        angles = (torch.arange(complete) * ratio)[:, None] * FREQUENCIES.double()
        half = len(FREQUENCIES)
        left, right = keys[:, :half].clone(), keys[:, half : 2 * half].clone()
        keys[:, :half] = left * angles.cos() - right * angles.sin()
        keys[:, half : 2 * half] = right * angles.cos() + left * angles.sin()
        keys = keys.to(self.dtype).double()
        return torch.relu(self.index_q[position].double() @ keys.T).sum(dim=0)

    def expected(self, norm: torch.Tensor, position: int) -> torch.Tensor | None:
        """The result of a token, None where a rounding may decide between two blocks."""
        k, v, _ = self.read()
        scores, most, ratio = self.scores(norm, position), self.sizes.selected, self.sizes.ratio
        order = sorted(range(len(scores)), key=lambda block: (-float(scores[block]), block))
        if len(order) > most:
            last, first_left_out = (float(scores[order[place]]) for place in (most - 1, most))
            if last - first_left_out < (1e-3 if self.dtype == torch.float32 else 0.1) * math.sqrt(self.sizes.index_dim):
                return None
        seen = [place for block in sorted(order[:most]) for place in range(block * ratio, (block + 1) * ratio)]
        seen += range(len(scores) * ratio, position + 1)
        out = []
        for head in range(self.sizes.heads):
            own = head // (self.sizes.heads // self.sizes.kv_heads)
            weights = (k[seen, own] @ self.q[position, head].double() * SCALE).softmax(dim=0)
            out.append(weights @ v[seen, own])
        return torch.stack(out)


def run(isa: str, rows: list[tuple[Text, Row]], norm: torch.Tensor) -> list[torch.Tensor]:
    """The results of each row's tokens, in one step; whatever no token is to see is NaN, and padding gives zeros."""
    sizes, dtype = rows[0][0].sizes, rows[0][0].dtype
    ends = [row.start + row.new for _, row in rows]
    needed = [-(-end // sizes.block_size) for end in ends]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(len(rows))) + 1).int()
    tables = torch.zeros(len(rows), max(needed) + 2, dtype=torch.int32)
    caches: list[torch.Tensor] = []
    all_scales: list[torch.Tensor | None] = []
    for values, scales in rows[0][0].kept:
        shape = (sum(needed) + 1, sizes.block_size, *values.shape[1:])
        has_scales = scales is not None
        caches.append(torch.full(shape, 127 if has_scales else torch.nan, dtype=values.dtype))
        all_scales.append(torch.full(shape[:3], torch.nan) if has_scales else None)
    starts, q, index_q = [0], [], []
    for number, (text, row) in enumerate(rows):
        taken = sum(needed[:number])
        tables[number, : needed[number]] = order[taken : taken + needed[number]]
        at = torch.arange(ends[number])
        cells = tables[number].long()[at // sizes.block_size] * sizes.block_size + at % sizes.block_size
        for cache, scales, (own, own_scales) in zip(caches, all_scales, text.kept, strict=True):
            cache.flatten(0, 1)[cells] = own[: ends[number]]
            if scales is not None and own_scales is not None:
                scales.flatten(0, 1)[cells] = own_scales[: ends[number]]
        for of_step, own in ((q, text.q), (index_q, text.index_q)):
            of_step.append(own[row.start : ends[number]])
            of_step.append(torch.full((row.padding, *own.shape[1:]), torch.nan, dtype=dtype))
        starts.append(starts[-1] + row.new + row.padding)
    arguments: tuple[Any, ...] = (spaced(torch.cat(q), 5), *caches[:2], spaced(torch.cat(index_q), 3), caches[2], norm)
    arguments += (EPS, FREQUENCIES, 1.0, int32(starts), int32([row.start for _, row in rows]))
    arguments += (int32([end * (row.new > 0) for end, (_, row) in zip(ends, rows, strict=True)]), tables[:, :-1])
    out = checked_kernel(isa, "indexed_attention")(
        *arguments, SCALE, sizes.selected * sizes.ratio, sizes.ratio, *all_scales
    )
    parts = []
    for start, (_, row) in zip(starts, rows, strict=False):
        parts.append(out[start : start + row.new])
        assert not out[start + row.new : start + row.new + row.padding].any(), "padding is zeros"
    return parts


def norm_of(sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(sizes.index_dim, generator=torch.Generator().manual_seed(7)) * 0.3).to(dtype)


@few
@given(
    sizes=st.builds(
        Sizes,
        heads=st.sampled_from([2, 6, 26]),
        kv_heads=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([8, 24, 40, 64]),
        index_heads=st.integers(1, 9),
        index_dim=st.sampled_from([4, 20, 32]),
        ratio=st.integers(1, 5),
        selected=st.integers(1, 60),
        block_size=st.sampled_from([4, 16]),
    ),
    rows=st.lists(
        st.builds(Row, st.integers(0, 300), st.sampled_from([0, 1, 1, 3, 17, 40]), st.integers(0, 2)),
        min_size=1,
        max_size=4,
    ),
    int8=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
def test_each_token_attends_to_the_blocks_of_the_highest_scores_and_to_what_follows(
    isa: str, sizes: Sizes, rows: list[Row], int8: bool, dtype: torch.dtype, seed: int
) -> None:
    texts = [Text(row.start + row.new, sizes, dtype, seed + i, int8) for i, row in enumerate(rows)]
    norm = norm_of(sizes, dtype)
    for text, row, result in zip(texts, rows, run(isa, list(zip(texts, rows, strict=True)), norm), strict=True):
        for i in range(row.new):
            expected = text.expected(norm, row.start + i)
            if expected is not None:
                atol = TOLERANCE[dtype] * max(1.0, float(text.read()[1].abs().max()))
                torch.testing.assert_close(result[i].double(), expected, atol=atol, rtol=0)


def test_most_tokens_of_a_long_text_are_decided(isa: str) -> None:
    """The test above would otherwise compare little."""
    sizes, dtype = Sizes(), torch.float32
    text, norm = Text(200, sizes, dtype, 3), norm_of(sizes, dtype)
    [result] = run(isa, [(text, Row(0, 200))], norm)
    expected = [text.expected(norm, position) for position in range(200)]
    assert sum(each is not None for each in expected) > 190
    for found, each in zip(result, expected, strict=True):
        if each is not None:
            torch.testing.assert_close(found.double(), each, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_chunk_beside_any_rows(isa: str, dtype: torch.dtype, int8: bool) -> None:
    sizes = Sizes(heads=6, ratio=4, selected=40, head_dim=40)
    length = INDEX_GROUP_TOKENS + 90
    text, other, norm = (Text(length, sizes, dtype, 5, int8), Text(240, sizes, dtype, 6, int8), norm_of(sizes, dtype))
    [whole] = run(isa, [(text, Row(0, length))], norm)
    for cuts in ([1, 159, 160, 161, 300], [length - 1], [90, 200]):
        begin = 0
        for end in [*cuts, length]:
            beside = [(other, Row(239, 1, 2)), (other, Row(100, 30))]
            _, found, _ = run(isa, [beside[0], (text, Row(begin, end - begin, begin % 2)), beside[1]], norm)
            assert same_bits(found, whole[begin:end])
            begin = end


def test_of_equal_scores_the_first_blocks_count_and_a_score_may_be_nan(isa: str) -> None:
    sizes, dtype = Sizes(ratio=2, selected=3), torch.float32
    text, norm = Text(60, sizes, dtype, 8), norm_of(sizes, dtype)
    text.index_q.zero_()
    [equal] = run(isa, [(text, Row(59, 1))], norm)
    k, v, _ = text.read()
    seen = [*range(6)]
    weights = torch.einsum("hd,khd->hk", text.q[59].double(), k[seen].repeat_interleave(2, 1)) * SCALE
    expected = torch.einsum("hk,khd->hd", weights.softmax(dim=1), v[seen].repeat_interleave(2, 1))
    torch.testing.assert_close(equal[0].double(), expected, atol=1e-5, rtol=1e-4)
    text.index_q.fill_(torch.nan)
    [of_nan] = run(isa, [(text, Row(59, 1))], norm)
    assert same_bits(of_nan, equal)
