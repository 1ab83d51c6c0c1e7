"""An indexer's choice of blocks, attention to them, and the weights of doubly stochastic streams, against definitions
written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.reference.indexed_attention import select_blocks, selected_attention
from ostinato.ops.reference.mhc import mhc_weights, mix_streams
from tests.ops.test_ops import few, normal, seeds

BLOCK_SIZE, NAN = 4, float("nan")


def paged(values: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """`values` [length, heads, size] in these blocks of a cache whose other cells are NaN."""
    cache = torch.full((max(blocks) + 2, BLOCK_SIZE, *values.shape[1:]), NAN)
    for position, value in enumerate(values):
        cache[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = value
    return cache


def chosen(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, gates: torch.Tensor, most: int) -> list[int]:
    """Blocks with complete positions, `keys` and `gates` [blocks, ratio, size], that a token chooses."""
    scores = []
    for key, gate in zip(keys.double(), gates.double(), strict=True):
        shares = gate.exp() / gate.exp().sum(dim=0)
        of_heads = [max(float(head @ (shares * key).sum(dim=0)), 0.0) for head in query.double()]
        scores.append(sum(float(weight) * score for weight, score in zip(weights, of_heads, strict=True)))
    return sorted(sorted(range(len(scores)), key=lambda block: -scores[block])[:most])


@few
@given(
    st.integers(1, 40), st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), seeds
)
def test_a_token_attends_to_the_blocks_that_score_highest_and_to_its_incomplete_one(
    length: int, new: int, ratio: int, most: int, has_tail: bool, pads: bool, seed: int
) -> None:
    """The second row of the step is one of padding, or the first one has tokens of it behind its own."""
    new = min(new, length)
    generator = torch.Generator().manual_seed(seed)
    heads, size, index_size = 2, 6, 3
    entries, bias = normal(generator, length, 1, 2 * index_size), normal(generator, ratio, index_size)
    keys, values = normal(generator, length, 1, size), normal(generator, length, 1, size)
    tokens = new + 2
    q, index_q = normal(generator, tokens, heads, size), normal(generator, tokens, 5, index_size)
    weights = normal(generator, tokens, 5)
    blocks = torch.randperm(-(-length // BLOCK_SIZE) + 3, generator=generator).tolist()
    starts = torch.tensor([0, tokens, tokens] if pads else [0, new, tokens], dtype=torch.int32)
    rows = (
        starts,
        torch.tensor([length - new, 0], dtype=torch.int32),
        torch.tensor([length, 0], dtype=torch.int32),
        torch.tensor([blocks, [0] * len(blocks)], dtype=torch.int32),
    )
    index_cache, k_cache, v_cache = (paged(each, blocks) for each in (entries, keys, values))
    selected = select_blocks(index_q, weights, index_cache, bias, *rows, most * ratio, ratio)
    out = selected_attention(q, k_cache, v_cache, selected, *rows, 0.3, ratio, has_tail)
    assert (selected[new:] == -1).all()
    assert (out[new:] == 0).all()
    by_block = entries[: length // ratio * ratio, 0].view(-1, ratio, 2 * index_size)
    for token in range(new):
        seen = length - new + token + 1
        complete = by_block[: seen // ratio]
        expected = chosen(index_q[token], weights[token], complete[..., :3], complete[..., 3:] + bias, most)
        assert sorted(block for block in selected[token].tolist() if block >= 0) == expected
        positions = [block * ratio + i for block in expected for i in range(ratio)]
        positions += range(seen // ratio * ratio, seen) if has_tail else []
        for head in range(heads):
            scores = [math.exp(0.3 * float(q[token, head].double() @ keys[at, 0].double())) for at in positions]
            result = torch.zeros(size, dtype=torch.float64)
            for score, at in zip(scores, positions, strict=True):
                result += score / sum(scores) * values[at, 0].double()
            torch.testing.assert_close(out[token, head], result.float(), atol=1e-5, rtol=1e-4)


def test_of_equal_scores_the_first_block_counts() -> None:
    index_q, weights = torch.ones(1, 2, 1), torch.ones(1, 2)
    entries = torch.tensor([-1.0, -2.0, 3.0, -1.0, 3.0, 0.0]).view(6, 1, 1)
    cache = paged(torch.cat((entries, torch.zeros(6, 1, 1)), dim=2), [1, 2])
    rows = [torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [5], [6], [[1, 2]])]
    selected = select_blocks(index_q, weights, cache, torch.zeros(1, 1), *rows, 3, 1)
    assert selected.tolist() == [[2, 4, 0]]


@few
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 3), st.booleans(), seeds)
def test_the_weights_of_streams_are_their_definition(
    tokens: int, streams: int, iterations: int, adds: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, size, eps = streams, 3, 0.01
    x, fn = normal(generator, tokens, n * size), normal(generator, (n + 2) * n, n * size)
    base, scale = normal(generator, (n + 2) * n), normal(generator, 3)
    weights = mhc_weights(x, fn, base, scale, n, 0.1, eps, iterations)
    y = normal(generator, tokens, size)
    out = mix_streams(x, y if adds else None, weights[:, n:] if adds else weights[:, :n], n)
    for token in range(tokens):
        rms = math.sqrt(float(x[token].double().square().mean()) + 0.1)
        z = (fn.double() @ x[token].double() / rms).tolist()
        pre = [1 / (1 + math.exp(-(float(scale[0]) * z[i] + float(base[i])))) + eps for i in range(n)]
        post = [2 / (1 + math.exp(-(float(scale[1]) * z[n + i] + float(base[n + i])))) for i in range(n)]
        exps = [
            [math.exp(float(scale[2]) * z[2 * n + i * n + j] + float(base[2 * n + i * n + j])) for j in range(n)]
            for i in range(n)
        ]
        comb = [[value / sum(row) + eps for value in row] for row in exps]
        for iteration in range(iterations):
            if iteration:
                comb = [[value / (sum(row) + eps) for value in row] for row in comb]
            sums = [sum(row[j] for row in comb) + eps for j in range(n)]
            comb = [[value / sums[j] for j, value in enumerate(row)] for row in comb]
        written = [value for j in range(n) for value in (*(comb[i][j] for i in range(n)), post[j])]
        assert weights[token].tolist() == pytest.approx([*pre, *written], rel=1e-3, abs=1e-5)
        parts = x[token].double().view(n, size)
        mixed = sum(pre[i] * parts[i] for i in range(n))
        if adds:
            by_stream = [sum(comb[i][j] * parts[i] for i in range(n)) + post[j] * y[token] for j in range(n)]
            mixed = torch.cat(by_stream)
        torch.testing.assert_close(out[token].double(), mixed.double(), rtol=1e-3, atol=1e-4)


def test_one_row_of_weights_mixes_all_tokens_and_rounds_once() -> None:
    x = torch.tensor([[1.0, 2.0, 256.0, 0.5], [4.0, 8.0, 1.0, 1.0]]).bfloat16()
    out = mix_streams(x, None, torch.tensor([[0.5, 0.5]]), 2)
    assert out.dtype is torch.bfloat16
    assert out.tolist() == [[128.0, 1.25], [2.5, 4.5]]
