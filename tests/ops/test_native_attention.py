"""The native attention: against its formula in float64, and the same bits for a token however it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.quant.quantize import quantize_int8
from ostinato.ops.ukernels import MIN_AMX_QUERIES
from tests.support.examples import examples
from tests.support.native_sets import SETS, native_kernel, record, threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of the largest value; float32 as asked of every kernel, the others a rounding of weights and one of results."""

pytestmark = pytest.mark.parametrize("isa", SETS)


@dataclass(frozen=True)
class Row:
    """`new` tokens from position `start` on, and `padding` tokens that the row owns behind them."""

    start: int
    new: int
    padding: int = 0


class Context:
    """One text's queries, keys and values at every position, from which any row of a step can be taken."""

    def __init__(
        self,
        length: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        seed: int,
        int8: bool = False,
        has_sinks: bool = False,
        softcap: float | None = None,
        image: tuple[int, int] | None = None,
    ) -> None:
        """`image` are the positions, from the first up to the second, that see each other in both directions."""
        self.int8, self.softcap = int8, softcap
        self.last_seen = torch.arange(length)
        if image is not None:
            self.last_seen[slice(*image)] = min(image[1], length) - 1
        self.sinks = torch.linspace(4.0, -3.0, heads) if has_sinks else None
        generator = torch.Generator().manual_seed(seed)

        def normal(count: int) -> torch.Tensor:
            return torch.randn(length, count, head_dim, generator=generator).to(dtype)

        self.q, self.k, self.v = normal(heads), normal(kv_heads), normal(kv_heads)

    def kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values as 8-bit integers, and the scale of each token's head."""
        whole = [(x, quantize_int8(x.flatten(0, 1), None)) for x in (self.k, self.v)]
        return [(integers.view(x.shape), scales.view(x.shape[:2])) for x, (integers, scales) in whole]

    def expected(self, row: Row, scale: float, first_key: int, window: int | None = None) -> torch.Tensor:
        """softmax(scale q k) v of each token over the keys up to its own, in float64; 0 where there is none."""
        heads, kv_heads = self.q.shape[1], self.k.shape[1]
        end = row.start + row.new
        q = self.q[row.start : end].double()
        read = [x.double() for x in (self.k, self.v)]
        if self.int8:
            read = [integers.double() * scales[:, :, None].double() for integers, scales in self.kept()]
        k, v = (x[:end].repeat_interleave(heads // kv_heads, dim=1) for x in read)
        key, position = torch.arange(end), torch.arange(row.start, end)
        unseen = (key > self.last_seen[position][:, None]) | (key < first_key)
        if window is not None:
            unseen |= key <= position[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(unseen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None, None].expand(-1, row.new, 1).double()), dim=-1)
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights[..., :end], v)


class Batch:
    """Rows as one step: a cache full of NaN but for the rows' own blocks, in random order, from the first key that one
    of their tokens sees up to their `kv_len`. Blocks without any are the null block. Of integers the scales are NaN."""

    def __init__(
        self, rows: Sequence[tuple[Context, Row]], block_size: int, first_key: int = 0, window: int | None = None
    ) -> None:
        self.rows, self.first_key, self.window = rows, first_key, window
        contexts = [context for context, _ in rows]
        self.sinks, self.softcap = contexts[0].sinks, contexts[0].softcap
        last = [torch.cat((c.last_seen[row.start : row.start + row.new], torch.zeros(row.padding))) for c, row in rows]
        own = [torch.cat((torch.arange(row.start, row.start + row.new), torch.zeros(row.padding))) for _, row in rows]
        self.last_seen = None if torch.equal(torch.cat(last), torch.cat(own)) else torch.cat(last).int()
        dtype, (_, kv_heads, head_dim) = contexts[0].k.dtype, contexts[0].k.shape
        needed = [-(-(row.start + row.new) // block_size) for _, row in rows]
        order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(len(rows))) + 1).int()
        tables = torch.zeros(len(rows), max(needed, default=0) + 2, dtype=torch.int32)
        shape, int8 = (sum(needed) + 1, block_size, kv_heads, head_dim), contexts[0].int8
        self.k_cache = torch.full(shape, 127, dtype=torch.int8) if int8 else torch.full(shape, torch.nan, dtype=dtype)
        self.v_cache = self.k_cache.clone()
        self.k_scales = torch.full(shape[:3], torch.nan) if int8 else None
        self.v_scales = torch.full(shape[:3], torch.nan) if int8 else None
        starts, q = [0], []
        for i, (context, row) in enumerate(rows):
            end, taken = row.start + row.new, sum(needed[:i])
            tables[i, : needed[i]] = order[taken : taken + needed[i]]
            seen = first_key if window is None else max(first_key, max(row.start, first_key) - window + 1)
            cells = tables[i].long()[torch.arange(end) // block_size] * block_size + torch.arange(end) % block_size
            values = (context.k, context.v)
            if self.k_scales is not None and self.v_scales is not None:
                (k, k_scales), (v, v_scales) = context.kept()
                values = (k, v)
                self.k_scales.flatten(0, 1)[cells[seen:]] = k_scales[seen:end]
                self.v_scales.flatten(0, 1)[cells[seen:]] = v_scales[seen:end]
            for cache, own in zip((self.k_cache, self.v_cache), values, strict=True):
                cache.flatten(0, 1)[cells[seen:]] = own[seen:end]
            q += [context.q[row.start : end], torch.full((row.padding, *context.q.shape[1:]), torch.nan, dtype=dtype)]
            tables[i, : seen // block_size] = 0
            starts.append(starts[-1] + row.new + row.padding)
        packed = torch.cat(q)
        # As a part of a wider projection: strided by token.
        self.q = torch.cat((packed, packed), dim=1)[:, : packed.shape[1]]
        self.row_starts = torch.tensor(starts, dtype=torch.int32)
        self.start_positions = torch.tensor([row.start for _, row in rows], dtype=torch.int32)
        self.kv_lens = torch.tensor([(row.start + row.new) * (row.new > 0) for _, row in rows], dtype=torch.int32)
        self.block_tables = tables[:, :-1]

    def arguments(self, scale: float) -> tuple[Any, ...]:
        described = (self.row_starts, self.start_positions, self.kv_lens, self.block_tables)
        scales = (self.k_scales, self.v_scales)
        how = (scale, self.first_key, self.window, *scales, self.sinks, self.softcap, self.last_seen)
        return (self.q, self.k_cache, self.v_cache, *described, *how)

    def run(self, isa: str, scale: float = 0.2, count: int = 1, *, deterministic: bool = False) -> torch.Tensor:
        with threads(count):
            return native_kernel(isa, "attention", deterministic=deterministic)(*self.arguments(scale))

    def of_row(self, out: torch.Tensor, row: int) -> torch.Tensor:
        """The row's tokens, padding too."""
        return out[self.row_starts[row] : self.row_starts[row + 1]]


ROWS = st.builds(
    Row,
    start=st.sampled_from((0, 1, 15, 16, 100, 127, 128, 129, 300)),
    new=st.sampled_from((0, 1, 1, 2, 5, 17, 40, 131)),
    padding=st.sampled_from((0, 0, 1, 3)),
)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 3, 4, 7)),
    head_dim=st.sampled_from((1, 5, 16, 32, 33, 64, 80, 128)),
    block_size=st.sampled_from((1, 3, 16)),
    first_key=st.sampled_from((0, 0, 1, 130)),
    window=st.sampled_from((None, None, 1, 2, 15, 16, 17, 100, 127, 128, 129, 131, 300, 431)),
    scale=st.sampled_from((0.1, 1.0)),
    dtype=st.sampled_from(DTYPES),
    deterministic=st.booleans(),
    int8=st.booleans(),
    has_sinks=st.booleans(),
    softcap=st.sampled_from((None, None, 0.7, 5.0, 50.0)),
    image=st.none() | st.tuples(st.integers(-5, 130), st.integers(1, 140)),
)
@examples(300)
@pytest.mark.slow
def test_every_token_gets_what_its_formula_says_and_padding_zeros(
    isa: str,
    rows: list[Row],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    first_key: int,
    window: int | None,
    scale: float,
    dtype: torch.dtype,
    deterministic: bool,
    int8: bool,
    has_sinks: bool,
    softcap: float | None,
    image: tuple[int, int] | None,
) -> None:
    """`image` is the first of the tokens that see each other, from the row's first one on, and their number."""
    contexts = []
    for i, r in enumerate(rows):
        own = None if image is None or first_key else (max(0, r.start + image[0]), r.start + image[0] + image[1])
        how = (dtype, i, int8, has_sinks, softcap, own if own and own[0] < own[1] else None)
        contexts.append(Context(r.start + r.new, kv_heads * group, kv_heads, head_dim, *how))
    batch = Batch(list(zip(contexts, rows, strict=True)), block_size, first_key, window)
    out = batch.run(isa, scale, deterministic=deterministic)
    assert torch.equal(out, batch.run(isa, scale, 2, deterministic=deterministic))
    assert out.dtype == dtype
    for i, (context, row) in enumerate(batch.rows):
        result, expected = batch.of_row(out, i).double(), context.expected(row, scale, first_key, window)
        assert bool((result[row.new :] == 0).all())
        if row.new:
            largest = float(context.v.abs().max())
            torch.testing.assert_close(result[: row.new], expected, rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "int8", "has_sinks", "softcap"),
    [
        (8, 2, 128, None, False, False, None), (3, 3, 20, None, False, False, None),
        (8, 4, 32, 1, False, False, None), (10, 2, 64, None, False, False, None), (10, 2, 64, 150, False, False, None),
        (8, 2, 40, 128, False, False, None), (8, 2, 40, 128, True, False, None), (8, 2, 128, None, True, False, None),
        (16, 2, 64, 128, False, True, None), (6, 2, 40, None, True, True, None), (8, 4, 64, 150, False, False, 2.0),
        (6, 2, 40, None, True, True, 1.0),
    ],
)  # fmt: skip
def test_the_bits_of_a_token_do_not_depend_on_how_it_is_computed(
    isa: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    int8: bool,
    has_sinks: bool,
    softcap: float | None,
    dtype: torch.dtype,
    deterministic: bool,
) -> None:
    """Unless deterministic, among rows of MIN_AMX_QUERIES queries or more for each key head."""
    least = 0 if deterministic else MIN_AMX_QUERIES - 1
    context, other = (Context(450, heads, kv_heads, head_dim, dtype, seed, int8, has_sinks, softcap) for seed in (1, 2))
    for position in (0, 15, 127, 128, 290, 449):

        def bits(before: int, after: int, *others: Row, count: int = 1, at: int = position) -> torch.Tensor:
            """In a row of so many tokens before and after the one at `at`, behind rows of another text."""
            start, end = max(0, at - before), min(450, at + after + 1)
            batch = Batch([*((other, row) for row in others), (context, Row(start, end - start))], 16, 0, window)
            return batch.of_row(batch.run(isa, count=count, deterministic=deterministic), len(others))[at - start]

        alone = bits(least, least)
        assert torch.equal(alone, bits(4 + least, least))
        assert torch.equal(alone, bits(1 + least, 3 + least))
        assert torch.equal(alone, bits(129, least))
        assert torch.equal(alone, bits(least, 129))
        assert torch.equal(alone, bits(61, 68))
        assert torch.equal(alone, bits(449, 449))
        assert torch.equal(alone, bits(least, least, Row(200, 1), Row(7, 90)))
        assert torch.equal(alone, bits(3 + least, least, Row(400, 5), count=2))
        assert torch.equal(alone, bits(449, 449, Row(0, 30), count=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 2, 9, 40])
def test_a_query_of_nan_gives_nan_and_spoils_no_other(isa: str, new: int, dtype: torch.dtype) -> None:
    context = Context(150 + new, 6, 2, 40, dtype, 0)
    clean = Batch([(context, Row(150, new))], 16).run(isa)
    context.q[149 + new, 4] = torch.nan
    out = Batch([(context, Row(150, new))], 16).run(isa)
    assert bool(out[new - 1, 4].isnan().all())
    out[new - 1, 4] = clean[new - 1, 4]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("new", [1, 9])
def test_a_value_that_is_infinite_is_so_for_all_who_see_it(isa: str, new: int) -> None:
    context = Context(150 + new, 6, 2, 40, torch.bfloat16, 0)
    context.v[20, 1, 7] = torch.inf
    out = Batch([(context, Row(150, new))], 16).run(isa, 0.01)
    assert bool((out[:, 3:, 7] == torch.inf).all())
    assert bool(out[:, :3].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[Row(2000, 1)], [Row(1500, 3), Row(3, 1)], [Row(900, 1), Row(0, 0, 1), Row(2000, 5)]])
def test_a_long_context_is_shared_by_threads_without_changing_a_bit(
    isa: str, rows: list[Row], dtype: torch.dtype
) -> None:
    contexts = [Context(row.start + row.new, 4, 1, 64, dtype, i) for i, row in enumerate(rows)]
    batch = Batch(list(zip(contexts, rows, strict=True)), 16)
    out = batch.run(isa)
    for count in (2, 3, 7):
        assert torch.equal(out, batch.run(isa, count=count))
    expected = torch.cat([context.expected(row, 0.2, 0) for context, row in batch.rows])
    torch.testing.assert_close(out[batch.kv_lens.repeat_interleave(batch.row_starts.diff()) > 0].double(), expected,
                               rtol=0, atol=4 * TOLERANCE[dtype])  # fmt: skip


@pytest.mark.parametrize("new", [1, 40])
def test_a_sink_of_minus_infinity_changes_no_bit_and_a_large_one_takes_all_weight(isa: str, new: int) -> None:
    context = Context(150 + new, 6, 2, 40, torch.bfloat16, 0)
    without = Batch([(context, Row(150, new))], 16).run(isa)
    context.sinks = torch.full((6,), -torch.inf)
    context.sinks[4] = 1e4
    out = Batch([(context, Row(150, new))], 16).run(isa)
    assert not out[:, 4].any()
    out[:, 4] = without[:, 4]
    torch.testing.assert_close(out, without, rtol=2.0**-7, atol=0)


def test_large_scores_neither_overflow_nor_vanish(isa: str) -> None:
    context = Context(200, 2, 1, 32, torch.float32, 0)
    context.k[50] = 30 * context.q[199, 0]
    context.k[60] = -30 * context.q[199, 1]
    batch = Batch([(context, Row(190, 10))], 16)
    out = batch.run(isa, 1.0).double()
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, context.expected(Row(190, 10), 1.0, 0), rtol=0, atol=2e-4)


def test_a_replay_reads_its_rows_when_it_runs_and_leaves_out_the_tokens_behind_them(isa: str) -> None:
    contexts = [Context(300, 4, 2, 48, torch.float32, seed) for seed in range(3)]
    captured = Batch([(context, Row(7, 1)) for context in contexts], 16)
    captured.block_tables = torch.zeros(3, 40, dtype=torch.int32)
    later = Batch([(contexts[0], Row(280, 1)), (contexts[1], Row(33, 1))], 16)
    captured.k_cache, captured.v_cache = later.k_cache, later.v_cache
    out = torch.full((3, 4, 48), 5.0)
    kernel = native_kernel(isa, "attention")
    program = record(isa, kernel, out, *captured.arguments(0.2))
    captured.q[:2] = later.q
    captured.start_positions[:] = torch.tensor([280, 33, 0])
    captured.kv_lens[:] = torch.tensor([281, 34, 0])
    captured.block_tables[:2, : later.block_tables.shape[1]] = later.block_tables
    program.run(2)
    assert torch.equal(out[:2], later.run(isa))
    assert bool((out[2] == 5.0).all())
    program.run(3)
    assert bool((out[2] == 0.0).all())


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_be_a_part_of_the_keys(isa: str, dtype: torch.dtype, int8: bool) -> None:
    """One cache is both, as in multi-head latent attention, whose heads are wide; and threads change no bit."""
    rows = [Row(0, 21), Row(140, 1), Row(33, 4, padding=2)]
    contexts = [Context(row.start + row.new, 8, 1, 576, dtype, i, int8) for i, row in enumerate(rows)]
    for context in contexts:
        context.v = context.k
    batch = Batch(list(zip(contexts, rows, strict=True)), 16)
    batch.v_cache, batch.v_scales = batch.k_cache, batch.k_scales
    out = batch.run(isa, 0.05)
    assert torch.equal(out, batch.run(isa, 0.05, count=2))
    for i, (context, row) in enumerate(zip(contexts, rows, strict=True)):
        expected = context.expected(row, 0.05, 0)
        given, allowed = batch.of_row(out, i), 4 * TOLERANCE[dtype]
        torch.testing.assert_close(given[: row.new].double(), expected, rtol=0, atol=allowed)
        assert not given[row.new :].any()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("new", [1, 9, 40])
def test_a_scale_of_nan_spoils_those_who_see_its_head_and_no_others(isa: str, new: int, which: str) -> None:
    context = Context(150 + new, 6, 2, 40, torch.bfloat16, 0, int8=True)
    batch = Batch([(context, Row(150, new))], 16)
    clean, scales = batch.run(isa), batch.k_scales if which == "k" else batch.v_scales
    assert scales is not None
    scales[batch.block_tables[0, 6], 4, 1] = torch.nan  # of position 100
    out = batch.run(isa)
    assert bool(out[:, 3:].isnan().all())
    assert torch.equal(out[:, :3], clean[:, :3])


def test_integers_without_scales_are_refused(isa: str) -> None:
    batch = Batch([(Context(3, 2, 1, 8, torch.float32, 0, int8=True), Row(0, 3))], 16)
    batch.k_scales = None
    with pytest.raises(AssertionError, match="int8 if it has scales"):
        batch.run(isa)
