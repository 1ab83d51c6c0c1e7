"""The reference kernels against their formulas, written out as loops in float64: all but those with a state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.operations import GATED
from ostinato.ops.quant.quantize import quantize_int8
from ostinato.ops.reference import attention, matmul, pointwise, rotary
from ostinato.ops.reference.matmul import ACTIVATIONS
from tests.support.examples import examples

few = examples(25)
seeds = st.integers(0, 2**31)

NAN = float("nan")
FLOAT32 = {"atol": 2e-5, "rtol": 1e-5}


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activated(name: str | None, values: list[float]) -> list[float]:
    half = len(values) // 2
    match name:
        case "silu":
            return [silu(value) for value in values]
        case "relu2":
            return [max(value, 0.0) ** 2 for value in values]
        case "swiglu" | "geglu":
            gate_of = silu if name == "swiglu" else gelu_tanh
            return [gate_of(gate) * up for gate, up in zip(values[:half], values[half:], strict=True)]
        case _:
            return values


@dataclass
class PagedCase:
    """Rows of a step over a paged cache whose every cell outside of the rows' contexts is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    row_starts: torch.Tensor
    start_positions: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor
    contexts: list[tuple[torch.Tensor, torch.Tensor]]
    """Each row's keys and values in order of position, those of the step included."""

    def run(
        self,
        scale: float,
        first_key: int = 0,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
        last_seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attention.attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.row_starts,
            self.start_positions,
            self.kv_lens,
            self.block_tables,
            scale,
            first_key,
            window,
            sinks=sinks,
            softcap=softcap,
            last_seen=last_seen,
        )

    def hide(self, window: int) -> None:
        """Makes NaN of all that is before the windows of a row's tokens, and null entries of blocks that are."""
        block_size = self.k_cache.shape[1]
        for row, start in enumerate(self.start_positions.tolist()):
            seen = max(0, start - window + 1)
            for position in range(min(seen, int(self.kv_lens[row]))):
                cell = self.block_tables[row, position // block_size], position % block_size
                self.k_cache[cell] = self.v_cache[cell] = NAN
            self.block_tables[row, : seen // block_size] = 0


def paged_case(
    rows: list[tuple[int, int]], kv_heads: int, group: int, head_dim: int, block_size: int, seed: int
) -> PagedCase:
    """`rows` are (tokens computed before, new tokens); a row with -1 before is padding, with a kv_len of 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(new for _, new in rows)
    lengths = [0 if before < 0 else before + new for before, new in rows]
    needed = [-(-length // block_size) for length in lengths]
    ids = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    shape = (len(ids) + 1, block_size, kv_heads, head_dim)
    case = PagedCase(
        normal(generator, tokens, kv_heads * group, head_dim),
        torch.full(shape, NAN),
        torch.full(shape, NAN),
        torch.zeros(len(rows) + 1, dtype=torch.int32),
        torch.tensor([max(before, 0) for before, _ in rows], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.zeros(len(rows), max([1, *needed]) + 1, dtype=torch.int32),
        [],
    )
    token = 0
    for row, (_, new) in enumerate(rows):
        blocks = [ids.pop() for _ in range(needed[row])]
        case.block_tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        keys, values = (normal(generator, lengths[row], kv_heads, head_dim) for _ in range(2))
        for position in range(lengths[row]):
            block, offset = blocks[position // block_size], position % block_size
            case.k_cache[block, offset], case.v_cache[block, offset] = keys[position], values[position]
        case.contexts.append((keys, values))
        token += new
        case.row_starts[row + 1] = token
    return case


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    until: Sequence[int] = (),
) -> torch.Tensor:
    """`q` [new, heads, head_dim], the last of the positions of `keys`, `values` [length, kv_heads, head_dim]."""
    q, keys, values = q.double(), keys.double(), values.double()
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros_like(q)
    for t in range(len(q)):
        visible = len(keys) - len(q) + t + 1
        first = 0 if window is None else max(0, visible - window)
        visible = until[t] + 1 if until else visible
        for head in range(q.shape[1]):
            scores = [float(q[t, head] @ keys[s, head // group]) * scale for s in range(first, visible)]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score - max(scores)) for score in scores]
            if sinks is not None:
                weights.append(math.exp(float(sinks[head]) - max(scores)))
            for s in range(first, visible):
                out[t, head] += weights[s - first] / sum(weights) * values[s, head // group]
    return out


ROWS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 20), st.integers(1, 9)),
        st.tuples(st.integers(1, 40), st.just(1)),
        st.tuples(st.just(-1), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=4,
)


@few
@given(ROWS, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([4, 16]), seeds)
def test_attention_reads_the_whole_context_of_a_row_and_nothing_else(
    rows: list[tuple[int, int]], kv_heads: int, group: int, block_size: int, seed: int
) -> None:
    case = paged_case(rows, kv_heads, group, 6, block_size, seed)
    out = case.run(scale=0.3)
    for row, (before, _) in enumerate(rows):
        span = slice(*case.row_starts[row : row + 2].tolist())
        expected = attend(case.q[span], *case.contexts[row], 0.3) if before >= 0 else torch.zeros_like(out[span])
        torch.testing.assert_close(out[span], expected.float(), **FLOAT32)


@few
@given(ROWS, st.sampled_from([1, 2, 3, 4, 5, 9, 48]), st.sampled_from([4, 16]), seeds)
def test_attention_with_a_window_reads_no_more_than_it(
    rows: list[tuple[int, int]], window: int, block_size: int, seed: int
) -> None:
    case = paged_case(rows, 2, 2, 6, block_size, seed)
    case.hide(window)
    out = case.run(scale=0.3, window=window)
    for row, (before, _) in enumerate(rows):
        span = slice(*case.row_starts[row : row + 2].tolist())
        expected = (
            attend(case.q[span], *case.contexts[row], 0.3, window) if before >= 0 else torch.zeros_like(out[span])
        )
        torch.testing.assert_close(out[span], expected.float(), **FLOAT32)


@pytest.mark.parametrize("window", [None, 3, 6, 14])
def test_a_chunk_of_several_slabs_attends_like_a_whole_one(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr("ostinato.ops.reference.attention.ATTENTION_SLAB", 4)
    case = paged_case([(7, 4), (5, 9), (0, 10), (3, 8)], kv_heads=2, group=2, head_dim=6, block_size=4, seed=2)
    out = case.run(scale=0.3, window=window)
    for row, context in enumerate(case.contexts):
        span = slice(*case.row_starts[row : row + 2].tolist())
        torch.testing.assert_close(out[span], attend(case.q[span], *context, 0.3, window).float(), **FLOAT32)


@few
@given(ROWS, st.sampled_from([None, 1, 4, 9]), st.integers(1, 3), st.integers(1, 3), seeds)
def test_a_sink_joins_the_sum_of_weights_and_has_no_value(
    rows: list[tuple[int, int]], window: int | None, kv_heads: int, group: int, seed: int
) -> None:
    case = paged_case(rows, kv_heads, group, 6, 4, seed)
    sinks = 2 * normal(torch.Generator().manual_seed(seed), kv_heads * group)
    out = case.run(scale=0.3, window=window, sinks=sinks)
    for row, (before, _) in enumerate(rows):
        span = slice(*case.row_starts[row : row + 2].tolist())
        context = case.contexts[row]
        expected = attend(case.q[span], *context, 0.3, window, sinks) if before >= 0 else torch.zeros_like(out[span])
        torch.testing.assert_close(out[span], expected.float(), **FLOAT32)


@few
@given(ROWS, st.sampled_from([None, 3]), st.sampled_from([0.1, 2.0]), st.integers(1, 3), st.booleans(), seeds)
def test_a_softcap_bounds_the_scores_and_no_sink(
    rows: list[tuple[int, int]], window: int | None, softcap: float, group: int, has_sinks: bool, seed: int
) -> None:
    case = paged_case(rows, 2, group, 6, 4, seed)
    sinks = 2 * normal(torch.Generator().manual_seed(seed), 2 * group) if has_sinks else None
    out = case.run(scale=0.9, window=window, sinks=sinks, softcap=softcap)
    for row, (before, _) in enumerate(rows):
        span = slice(*case.row_starts[row : row + 2].tolist())
        how = (0.9, window, sinks, softcap)
        expected = attend(case.q[span], *case.contexts[row], *how) if before >= 0 else torch.zeros_like(out[span])
        torch.testing.assert_close(out[span], expected.float(), **FLOAT32)


@few
@given(ROWS, st.sampled_from([None, 3, 9]), st.integers(0, 8), st.integers(1, 9), seeds)
def test_tokens_of_an_image_see_those_behind_them(
    rows: list[tuple[int, int]], window: int | None, first: int, count: int, seed: int
) -> None:
    case = paged_case(rows, 2, 2, 6, 4, seed)
    # In each row the tokens from number `first` on, up to `count` of them.
    until = [
        [before + (t if not first <= t < first + count else min(first + count, new) - 1) for t in range(new)]
        for before, new in rows
    ]
    out = case.run(
        scale=0.9, window=window, last_seen=torch.tensor([p for row in until for p in row], dtype=torch.int32)
    )
    for row, (before, _) in enumerate(rows):
        span = slice(*case.row_starts[row : row + 2].tolist())
        expected = torch.zeros_like(out[span])
        if before >= 0:
            expected = attend(case.q[span], *case.contexts[row], 0.9, window, until=until[row]).float()
        torch.testing.assert_close(out[span], expected, **FLOAT32)


@few
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(2, 6), st.integers(0, 5)), min_size=1, max_size=4), seeds)
def test_tokens_beyond_the_context_of_a_row_give_zeros(rows: list[tuple[int, int, int]], seed: int) -> None:
    case = paged_case([(before, new) for before, new, _ in rows], 2, 2, 6, 4, seed)
    for row, (before, new, padding) in enumerate(rows):
        real = max(1, new - padding)
        case.kv_lens[row] = before + real
        for position in range(before + real, before + new):  # padding has no keys there
            block = case.block_tables[row, position // 4]
            case.k_cache[block, position % 4] = case.v_cache[block, position % 4] = NAN
    out = case.run(scale=0.3)
    for row, (before, new, padding) in enumerate(rows):
        start, end = case.row_starts[row : row + 2].tolist()
        real = max(1, new - padding)
        keys, values = (each[: before + real] for each in case.contexts[row])
        expected = attend(case.q[start : start + real], keys, values, 0.3).float()
        torch.testing.assert_close(out[start : start + real], expected, **FLOAT32)
        assert not out[start + real : end].any()


@few
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3), st.integers(1, 3), seeds)
def test_keys_before_the_first_one_are_left_out(rows: list[tuple[int, int]], first_key: int, seed: int) -> None:
    case = paged_case(rows, 2, 2, 6, 4, seed)
    for row, (before, _) in enumerate(rows):  # what is left out may be anything
        for position in range(min(first_key, before)):
            block = case.block_tables[row, position // 4]
            case.k_cache[block, position % 4] = case.v_cache[block, position % 4] = NAN
    out = case.run(scale=0.3, first_key=first_key)
    for row, (before, new) in enumerate(rows):
        start, end = case.row_starts[row : row + 2].tolist()
        blind = min(new, max(0, first_key - before))
        keys, values = (each[first_key:] for each in case.contexts[row])
        expected = attend(case.q[start + blind : end], keys, values, 0.3).float()
        torch.testing.assert_close(out[start + blind : end], expected, **FLOAT32)
        assert not out[start : start + blind].any()


@few
@given(st.sampled_from([[(0, 5)], [(9, 1), (0, 3), (-1, 1)], [(6, 4), (17, 1)]]), st.sampled_from([None, 1, 5]), seeds)
def test_attention_reads_integers_times_the_scales_of_their_heads(
    rows: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    """As if that stood in the cache; where nothing of a row is, scales are NaN."""
    case = paged_case(rows, 2, 2, 6, 4, seed)
    expected, read = case.run(0.3, window=window), {}
    for name in ("k", "v"):
        cache = getattr(case, f"{name}_cache")
        whole, scales = quantize_int8(cache.nan_to_num(3.0).flatten(0, 2), None)
        scales = scales.view(cache.shape[:3]).clone()
        scales[cache.isnan().any(-1)] = NAN
        setattr(case, f"{name}_cache", whole.view(cache.shape) * scales.unsqueeze(-1))
        read[name] = whole.view(cache.shape), scales
    definition = case.run(0.3, window=window)
    (k, k_scales), (v, v_scales) = read["k"], read["v"]
    described = (case.row_starts, case.start_positions, case.kv_lens, case.block_tables)
    out = attention.attention(case.q, k, v, *described, 0.3, 0, window, k_scales, v_scales)
    torch.testing.assert_close(out, definition, **FLOAT32)
    assert not torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.1)


@dataclass
class RotaryCase:
    """Queries, keys and values of three tokens, and a cache of four blocks of four cells, all NaN. The last token is
    padding: its cell is the null block's first."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_cells: torch.Tensor

    def run(self, angles: torch.Tensor | None, key_multiplier: float = 1.0) -> torch.Tensor:
        caches = (self.k_cache, self.v_cache)
        return rotary.rotary(self.q, self.k, self.v, angles, key_multiplier, *caches, self.kv_cells)


def rotary_case(heads: int, head_dim: int, seed: int, dtype: torch.dtype = torch.float32) -> RotaryCase:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (normal(generator, 3, count, head_dim).to(dtype) for count in (heads, 2, 2))
    k_cache, v_cache = (torch.full((4, 4, 2, head_dim), NAN, dtype=dtype) for _ in range(2))
    return RotaryCase(q, k, v, k_cache, v_cache, torch.tensor([11, 5, 0]))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] with its pairs turned by `rotary_angles_launches` [tokens, half], in float64."""
    out = x.double()
    half = angles.shape[1]
    for token in range(len(x)):
        for i in range(half):
            angle = float(angles[token, i])
            first, second = x[token, :, i].double(), x[token, :, half + i].double()
            out[token, :, i] = first * math.cos(angle) - second * math.sin(angle)
            out[token, :, half + i] = second * math.cos(angle) + first * math.sin(angle)
    return out


@few
@given(st.sampled_from([2, 6, 8]), st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
def test_rotary_turns_pairs_of_the_first_part_of_a_head_and_passes_the_rest(
    rotated: int, rest: int, dtype: torch.dtype, seed: int
) -> None:
    case = rotary_case(4, rotated + rest, seed, dtype)
    angles = normal(torch.Generator().manual_seed(seed + 1), 3, rotated // 2) * 3
    out = case.run(torch.stack((angles.cos(), angles.sin())))
    keys = case.k_cache.flatten(0, 1)[case.kv_cells]
    for turned, x in ((out, case.q), (keys, case.k)):
        assert turned.dtype == dtype
        rtol = 1e-6 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(turned.double(), rotate(x, angles), atol=1e-6, rtol=rtol)
        assert torch.equal(turned[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("heads", [4, 0])
@pytest.mark.parametrize("has_positions", [True, False])
def test_rotary_writes_each_key_and_value_into_its_own_cell_only(heads: int, has_positions: bool) -> None:
    case = rotary_case(heads, 6, seed=1)
    angles = normal(torch.Generator().manual_seed(2), 3, 3)
    out = case.run(torch.stack((angles.cos(), angles.sin())) if has_positions else None, key_multiplier=0.5)
    expected_q = rotate(case.q, angles).float() if has_positions else case.q
    expected_k = rotate(case.k * 0.5, angles).float() if has_positions else case.k * 0.5
    torch.testing.assert_close(out, expected_q)
    for cache, new in ((case.k_cache, expected_k), (case.v_cache, case.v)):
        expected = torch.full_like(cache.flatten(0, 1), NAN)
        expected[case.kv_cells] = new
        torch.testing.assert_close(cache.flatten(0, 1), expected, equal_nan=True)


def test_rotary_without_values_writes_keys_alone() -> None:
    """As where values are a part of keys."""
    case = rotary_case(2, 6, seed=4)
    out = rotary.rotary(case.q, case.k, None, None, 1.0, case.k_cache, None, case.kv_cells)
    assert out is case.q
    assert torch.equal(case.k_cache.flatten(0, 1)[case.kv_cells], case.k)
    assert int(case.k_cache.isnan().all(dim=(2, 3)).sum()) == 16 - 3


def test_rotary_rounds_the_heads_of_keys_and_values_that_have_scales() -> None:
    """To at most half a step of their own scale, after keys are rotated; zeros have a scale of 0."""
    case = rotary_case(2, 6, seed=5)
    case.v[1, 1] = 0
    angles = normal(torch.Generator().manual_seed(6), 3, 3)
    caches = [torch.full((4, 4, 2, 6), 113, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((4, 4, 2), NAN) for _ in range(2)]
    turned = torch.stack((angles.cos(), angles.sin()))
    out = rotary.rotary(case.q, case.k, case.v, turned, 0.5, *caches, case.kv_cells, *scales)
    assert torch.equal(out, case.run(turned, 0.5))
    for whole, scale, new in zip(caches, scales, (rotate(case.k * 0.5, angles), case.v.double()), strict=True):
        own = scale.flatten(0, 1)[case.kv_cells]
        torch.testing.assert_close(own.double() * 127, new.abs().amax(-1))
        error = (whole.flatten(0, 1)[case.kv_cells] * own[..., None] - new).abs()
        assert bool((error <= own[..., None] * 0.5001).all())
        assert int(scale.isnan().sum()) == 2 * (16 - 3)


def test_rotary_without_angles_gives_the_queries_themselves() -> None:
    case = rotary_case(2, 6, seed=3)
    assert case.run(None) is case.q


def test_rotary_angles_are_the_scaled_cosines_and_sines_of_position_times_frequency() -> None:
    out = rotary.rotary_angles(torch.tensor([0, 3, 41]), torch.tensor([1.0, 0.125]), 0.5)
    expected = [
        [[0.5 * of(position * frequency) for frequency in (1.0, 0.125)] for position in (0, 3, 41)]
        for of in (math.cos, math.sin)
    ]
    torch.testing.assert_close(out, torch.tensor(expected))


@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_an_embedding_is_its_tokens_row_times_the_multiplier(multiplier: float) -> None:
    weight = torch.arange(12.0).view(4, 3).bfloat16()
    out = pointwise.embedding(torch.tensor([2, 0, 2]), weight, multiplier)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[value * multiplier for value in weight[token].tolist()] for token in (2, 0, 2)]


@pytest.mark.parametrize("activation", [None, "silu", "relu2", "swiglu", "geglu"])
@few
@given(st.integers(0, 4), st.booleans(), st.booleans(), st.booleans(), seeds)
def test_linear_scales_then_activates_then_adds(
    activation: str | None, tokens: int, has_bias: bool, has_scale: bool, has_residual: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = normal(generator, tokens, 3), normal(generator, 6, 3)
    bias, scale = (normal(generator, 6) if wanted else None for wanted in (has_bias, has_scale))
    results = 3 if activation in GATED else 6
    residual = normal(generator, tokens, results) if has_residual else None
    out = matmul.linear(x, weight, bias, residual, activation, scale)
    assert out.shape == (tokens, results)
    for token in range(tokens):
        values = [float(weight[i].double() @ x[token].double()) for i in range(6)]
        values = [value + (0.0 if bias is None else float(bias[i])) for i, value in enumerate(values)]
        values = [value * (1.0 if scale is None else float(scale[i])) for i, value in enumerate(values)]
        values = activated(activation, values)
        values = [v + (0.0 if residual is None else float(residual[token, i])) for i, v in enumerate(values)]
        torch.testing.assert_close(out[token], torch.tensor(values), **FLOAT32)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_linear_gives_the_dtype_of_its_input_or_the_one_asked_for(out_dtype: torch.dtype | None) -> None:
    x, weight, scale = torch.ones(2, 4).bfloat16(), torch.eye(4).bfloat16(), torch.full((4,), 1 + 2**-12)
    residual = torch.zeros(2, 4, dtype=out_dtype or torch.bfloat16)
    out = matmul.linear(x, weight, None, residual, None, scale, out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    assert out.unique().tolist() == [1 + 2**-12 if out_dtype else 1.0]  # scaled in float32, rounded at the end
    assert x.unique().tolist() == [1.0]


@few
@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from([0.0, 1.0]), seeds)
def test_rms_norm_divides_by_the_root_of_the_mean_square(tokens: int, size: int, offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = normal(generator, tokens, size) * 3, normal(generator, size)
    for token in range(tokens):
        root = math.sqrt(sum(float(value) ** 2 for value in x[token]) / size + 0.01)
        expected = torch.tensor([float(x[token, i]) / root * (float(weight[i]) + offset) for i in range(size)])
        torch.testing.assert_close(pointwise.rms_norm(x, weight, 0.01, offset)[token], expected, **FLOAT32)
    added = pointwise.rms_norm(x, weight, 0.01, offset, x)
    torch.testing.assert_close(added, pointwise.rms_norm(x, weight, 0.01, offset) + x, **FLOAT32)


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@few
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), seeds)
def test_gated_rms_norm_averages_each_group_of_channels_alone(
    norm_before_gate: bool, is_sigmoid: bool, tokens: int, groups: int, group_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = groups * group_size
    x, gate, weight = normal(generator, tokens, size), normal(generator, tokens, size), normal(generator, size)
    out = pointwise.gated_rms_norm(x, gate, weight, 0.01, group_size, norm_before_gate, is_sigmoid)
    for token in range(tokens):
        gates = [1 / (1 + math.exp(-value)) if is_sigmoid else silu(value) for value in gate[token].tolist()]
        inner = [float(value) * (1 if norm_before_gate else gates[i]) for i, value in enumerate(x[token])]
        for i in range(size):
            begin = i // group_size * group_size
            mean = sum(value**2 for value in inner[begin : begin + group_size]) / group_size
            expected = inner[i] / math.sqrt(mean + 0.01) * float(weight[i])
            expected *= gates[i] if norm_before_gate else 1
            assert float(out[token, i]) == pytest.approx(expected, abs=2e-5)


@few
@given(st.integers(0, 3), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
def test_the_first_half_of_a_tokens_values_gates_the_second(
    tokens: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    x = normal(torch.Generator().manual_seed(seed), tokens, 2 * size).to(dtype)
    out = matmul.gated_activation(x, "gelu")
    assert (out.shape, out.dtype) == ((tokens, size), dtype)
    for token in range(tokens):
        for i in range(size):
            gate, value = float(x[token, i]), float(x[token, size + i])
            expected = gate * (1 + math.erf(gate / math.sqrt(2))) / 2 * value
            assert float(out[token, i]) == pytest.approx(
                expected, rel=1e-5 if dtype is torch.float32 else 1e-2, abs=1e-6
            )


def test_gated_rms_norm_gives_the_dtype_of_the_gate() -> None:
    x, gate, weight = torch.randn(2, 4), torch.randn(2, 4).bfloat16(), torch.ones(4).bfloat16()
    assert pointwise.gated_rms_norm(x, gate, weight, 1e-5, 2).dtype == torch.bfloat16


@few
@given(st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
def test_without_a_weight_only_the_gate_is_applied(tokens: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, gate = normal(generator, tokens, 5), normal(generator, tokens, 5).to(dtype)
    out = pointwise.gated_rms_norm(x, gate, None, 0.01, None)
    gates = [[silu(float(value)) for value in row] for row in gate]
    expected = x * torch.tensor(gates, dtype=torch.float32).view(tokens, 5)
    torch.testing.assert_close(out, expected.to(dtype), atol=1e-6, rtol=1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("name", ["silu", "relu2", "swiglu", "geglu"])
def test_activations_are_their_formulas(name: str) -> None:
    x = torch.tensor([[-2.0, -0.5, 0.0, 0.5, 1.0, 3.0]])
    torch.testing.assert_close(ACTIVATIONS[name](x), torch.tensor([activated(name, x[0].tolist())]))


@pytest.mark.parametrize("name", ["relu2", "swiglu"])
@few
@given(st.integers(1, 7), st.integers(1, 3), seeds)
def test_moe_adds_up_what_each_chosen_expert_gives(name: str, tokens: int, top_k: int, seed: int) -> None:
    """Expert 4 is chosen by no token; a token may be there twice, and may choose an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, tokens, 5)
    x[-1] = x[0]
    ids = torch.randint(0, 4, (tokens, top_k), generator=generator)
    weights = normal(generator, tokens, top_k)
    up = normal(generator, 5, 12 if name == "swiglu" else 6, 5)
    down = normal(generator, 5, 5, 6)
    up[4] = down[4] = NAN
    residual = normal(generator, tokens, 5)
    out = matmul.moe(x, torch.stack((ids.float(), weights), dim=1), up, down, name, residual)
    for token in range(tokens):
        expected = residual[token].double()
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            inner = up[expert].double() @ x[token].double()
            inner = silu_gated(inner) if name == "swiglu" else inner.clamp(min=0) ** 2
            expected += weight * (down[expert].double() @ inner)
        torch.testing.assert_close(out[token], expected.float(), atol=1e-3, rtol=1e-4)


def silu_gated(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2)
    return torch.tensor([silu(float(g)) * float(u) for g, u in zip(gate, up, strict=True)], dtype=torch.float64)


@pytest.mark.parametrize("normalize", [False, True])
@few
@given(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3)]), st.integers(1, 3), seeds)
def test_the_sigmoid_router_chooses_within_the_best_groups_and_weighs_without_the_bias(
    normalize: bool, groups: tuple[int, int], top_k: int, seed: int
) -> None:
    num_groups, top_groups = groups
    generator = torch.Generator().manual_seed(seed)
    scores, bias = normal(generator, 4, 12), normal(generator, 12)
    choices = matmul.route(scores, torch.eye(12), bias, top_k, num_groups, top_groups, normalize, 2.5, False, 0.3)
    ids, weights = choices.unbind(1)
    size = 12 // num_groups
    for token in range(4):
        sigmoid = [1 / (1 + math.exp(-float(score))) for score in scores[token]]
        choice = [probability + float(b) for probability, b in zip(sigmoid, bias, strict=True)]
        of_group = [sum(sorted(choice[g * size : g * size + size])[-2:]) for g in range(num_groups)]
        best_groups = sorted(range(num_groups), key=lambda g: -of_group[g])[:top_groups]
        allowed = [expert for expert in range(12) if expert // size in best_groups]
        expected = sorted(allowed, key=lambda expert: -choice[expert])[:top_k]
        total = sum(sigmoid[expert] for expert in expected) + 0.3 if normalize else 1.0
        assert ids[token].tolist() == expected
        assert weights[token].tolist() == pytest.approx([2.5 * sigmoid[e] / total for e in expected], rel=1e-5)


@few
@given(st.sampled_from([0.0, 1.0]), seeds)
def test_experts_add_biases_and_clamp_gates_above_and_values_on_both_sides(offset: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, up, down = normal(generator, 3, 8), normal(generator, 2, 10, 8), normal(generator, 2, 8, 5)
    up_bias, down_bias = 2 * normal(generator, 2, 10), normal(generator, 2, 8)
    choices = torch.tensor([[[0.0, 1.0], [0.25, 0.5]], [[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [-1.0, 2.0]]])
    biases = {"up_bias": up_bias, "down_bias": down_bias}
    out = matmul.moe(x, choices, up, down, "swiglu", x, **biases, clamp=(1.7, 1.5, offset))
    for token in range(3):
        expected = x[token].double()
        for expert, weight in choices[token].T.tolist():
            e = int(expert)
            gates, values = (up[e].double() @ x[token].double() + up_bias[e].double()).chunk(2)
            inner = []
            for gate, value in zip(gates.tolist(), values.tolist(), strict=True):
                gate, value = min(gate, 1.5), max(-1.5, min(value, 1.5))
                inner.append(gate / (1 + math.exp(-1.7 * gate)) * (value + offset))
            result = down[e].double() @ torch.tensor(inner, dtype=torch.float64) + down_bias[e].double()
            expected = expected + weight * result
        torch.testing.assert_close(out[token], expected.float(), atol=1e-4, rtol=1e-4)


@few
@given(st.integers(1, 5), st.booleans(), st.booleans(), seeds)
def test_the_softmax_router_weighs_the_chosen_experts_among_themselves_or_all(
    top_k: int, over_all: bool, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, bias = normal(generator, 3, 5), normal(generator, 5) if has_bias else None
    scales = normal(generator, 5)
    options = {"scaling": 0.5, "softmax_over_all": over_all, "bias": bias, "expert_scales": scales}
    ids, weights = matmul.route(x, torch.eye(5), None, top_k, **options).unbind(1)
    scores = x if bias is None else x + bias
    for token in range(3):
        expected = sorted(range(5), key=lambda expert: -float(scores[token, expert]))[:top_k]
        powers = [math.exp(float(score)) for score in scores[token]]
        total = sum(powers) if over_all else sum(powers[expert] for expert in expected)
        assert ids[token].tolist() == expected
        given = [0.5 * powers[e] / total * float(scales[e]) for e in expected]
        assert weights[token].tolist() == pytest.approx(given, rel=1e-5)


def test_linear_multiplies_each_head_by_its_own_rows() -> None:
    x, weight = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    expected = torch.einsum("thi,hoi->tho", x, weight.unflatten(0, (3, 2)))
    torch.testing.assert_close(matmul.linear(x, weight), expected)


def test_an_embedding_may_be_wider_than_its_weights() -> None:
    weight = torch.randn(4, 6).bfloat16()
    vectors = pointwise.embedding(torch.tensor([3, 1]), weight, 0.3, out_dtype=torch.float32)
    assert torch.equal(vectors, weight[[3, 1]].float() * 0.3)


@pytest.mark.parametrize("has_channels", [True, False])
def test_a_gate_of_heads_multiplies_their_channels(has_channels: bool) -> None:
    x, gate = torch.randn(2, 12), torch.randn(2, 3, 4)
    given = gate if has_channels else gate[:, :, 0]
    out = pointwise.gated_rms_norm(x, given, None, 0.0, None, False, True)
    wide = gate if has_channels else gate[:, :, :1].expand(-1, -1, 4)
    torch.testing.assert_close(out, x * wide.sigmoid().reshape(2, 12))
