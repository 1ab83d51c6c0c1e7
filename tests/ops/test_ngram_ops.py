"""Operations of n-gram embeddings and of indexed attention, against definitions written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from ostinato.ops.reference.conv import dilated_conv1d
from ostinato.ops.reference.indexed_attention import indexed_attention
from ostinato.ops.reference.ngram import ngram_embedding, ngram_gate, ngram_ids
from ostinato.ops.sizes import INDEX_SLAB, TOKEN_DIGITS

END = 70_000
MULTIPLIERS = (101, 10_007, 1_000_003)
SIZES = (11, 13, 17, 19)
STARTS = (0, 11, 24, 41)


def rows_of(tokens: list[int]) -> list[list[int]]:
    """The table rows of each token of a text."""
    rows = []
    for last in range(len(tokens)):
        found = []
        for n in (2, 3):
            gram = [tokens[last]]
            for place in range(last - 1, last - n, -1):
                ended = gram[-1] == END and len(gram) > 1
                gram.append(END if place < 0 or ended else tokens[place])
            mixed = 0
            for token, multiplier in zip(gram, MULTIPLIERS, strict=False):
                mixed ^= token * multiplier
            found += [mixed % SIZES[head] + STARTS[head] for head in range(2 * (n - 2), 2 * (n - 1))]
        rows.append(found)
    return rows


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ngrams_of_chunks_checkpoints_and_verify_steps_are_those_of_the_whole_text(dtype: torch.dtype) -> None:
    text = [5, 99_999, END, 7, END, END, 16_777_215, 3, 65_536, 255, 256, 4]
    expected = torch.tensor(rows_of(text))
    states = torch.full((9, 2, TOKEN_DIGITS), torch.nan, dtype=dtype)
    tables = [torch.tensor(each) for each in (MULTIPLIERS, SIZES, STARTS)]

    def step(begin: int, end: int, read: int, writes: list[list[int]], decodes: int, checkpoints=()) -> torch.Tensor:
        """A step of the tokens, followed by padding."""
        tokens = torch.tensor([*text[begin:end], 0])
        rows = (int32(0, end - begin), int32(read), torch.tensor(writes, dtype=torch.int32), decodes, checkpoints)
        return ngram_ids(tokens, *tables, END, states, *rows)[:-1]

    assert torch.equal(step(0, 12, 0, [[1]], 0), expected)
    first = step(0, 1, 0, [[2]], 0)
    second = step(1, 7, 2, [[3]], 0, ((0, 1, 4), (0, 5, 5)))
    verified = step(7, 10, 3, [[6, 7, 8]], 1)
    assert torch.equal(torch.cat((first, second, verified)), expected[:10])
    assert torch.equal(step(2, 7, 4, [[3]], 0), expected[2:7])  # from the checkpoint after the second token
    assert torch.equal(step(6, 12, 5, [[3]], 0), expected[6:])
    assert torch.equal(step(8, 12, 6, [[3]], 0), expected[8:])  # after the first token of the verify step alone
    assert torch.equal(step(10, 12, 8, [[3]], 0), expected[10:])


def test_rows_of_a_table_in_parts_are_those_of_the_whole() -> None:
    table = torch.randn(23, 6, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 22, 7], [8, 15, 16]])
    for dtype in (torch.float32, torch.bfloat16):
        rows = ngram_embedding(ids, table.split(8), dtype)
        assert rows.dtype == dtype
        assert torch.equal(rows, table[ids].flatten(1).to(dtype))


def test_a_gate_is_the_sigmoid_of_a_signed_root() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries, values = (torch.randn(5, size, generator=generator) for size in (12, 12, 4))
    keys[0], queries[1, :4] = 0, 1e-9
    gated = ngram_gate(keys, queries, values)
    for token in range(5):
        for stream in range(3):
            here = slice(4 * stream, 4 * stream + 4)
            score = float(keys[token, here].double() @ queries[token, here].double()) / 2
            root = 0.0 if score == 0 else math.copysign(math.sqrt(max(abs(score), 1e-6)), score)
            expected = values[token].double() / (1 + math.exp(-root))
            torch.testing.assert_close(gated[token, here].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_convolution_with_gaps_is_torchs_however_it_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 6, generator=generator), torch.randn(3, 6, generator=generator)
    padded = torch.nn.functional.pad(x.T, (8, 0))
    whole = torch.nn.functional.conv1d(padded[None], weight.T[:, None], groups=6, dilation=4)[0]
    expected = torch.nn.functional.silu(whole).T
    states = torch.full((4, 8, 6), torch.nan)
    parts = []
    for begin, end, read, write in ((0, 3, 0, 1), (3, 15, 1, 2), (15, 20, 2, 3)):
        rows = (int32(0, end - begin), int32(read), torch.tensor([[write]], dtype=torch.int32), 0)
        parts.append(dilated_conv1d(x[begin:end], weight, 4, states, *rows))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


BLOCK, HEADS, KV_HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, RATIO, BUDGET = 4, 4, 2, 8, 3, 6, 3, 9


def defined(q, k, v, index_q, raw, norm, frequencies, kv_len: int, first: int) -> torch.Tensor:
    """Indexed attention of the tokens at `first` to `kv_len - 1`, in float64."""
    q, k, v, index_q, raw, norm = (each.double() for each in (q, k, v, index_q, raw, norm))
    out = torch.zeros(kv_len - first, HEADS, SIZE, dtype=torch.float64)
    for position in range(first, kv_len):
        complete = (position + 1) // RATIO
        scores = []
        for block in range(complete):
            key = raw[block * RATIO : (block + 1) * RATIO].mean(dim=0)
            key = key / torch.sqrt((key * key).mean() + 1e-5) * (1 + norm)
            angles = block * RATIO * frequencies.double()
            half = len(angles)
            left, right = key[:half].clone(), key[half : 2 * half].clone()
            key[:half] = left * angles.cos() - right * angles.sin()
            key[half : 2 * half] = right * angles.cos() + left * angles.sin()
            scores.append(float(torch.relu(index_q[position - first] @ key).sum()) / math.sqrt(INDEX_SIZE))
        chosen = sorted(range(complete), key=lambda block: (-scores[block], block))[: BUDGET // RATIO]
        seen = [place for block in sorted(chosen) for place in range(block * RATIO, (block + 1) * RATIO)]
        seen += range(complete * RATIO, position + 1)
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            weights = (k[seen, own] @ q[position - first, head] * 0.3).softmax(dim=0)
            out[position - first, head] = weights @ v[seen, own]
    return out


@pytest.mark.parametrize(("kv_len", "first"), [(1, 0), (9, 0), (11, 4), (12, 0), (30, 0), (31, 30), (80, 7)])
def test_attention_sees_the_blocks_of_the_highest_scores_and_what_follows_them(kv_len: int, first: int) -> None:
    assert kv_len < 80 or kv_len - first > 2 * INDEX_SLAB
    generator = torch.Generator().manual_seed(kv_len)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    new, num_blocks = kv_len - first, -(-kv_len // BLOCK)
    q, index_q, norm = random(new + 2, HEADS, SIZE), random(new + 2, INDEX_HEADS, INDEX_SIZE), random(INDEX_SIZE)
    index_q[:2] = -index_q[:2].abs()
    index_q[2::3] = 0  # all scores of these tokens are equal, and they see the first blocks
    k, v, raw = random(kv_len, KV_HEADS, SIZE), random(kv_len, KV_HEADS, SIZE), random(kv_len, INDEX_SIZE)
    frequencies = torch.tensor([1.0, 0.1])
    order = torch.randperm(num_blocks, generator=generator) + 1
    caches = []
    for values in (k, v, raw[:, None]):
        cache = torch.full((num_blocks + 2, BLOCK, *values.shape[1:]), torch.nan)
        for position in range(kv_len):
            cache[order[position // BLOCK], position % BLOCK] = values[position]
        caches.append(cache)
    k_cache, v_cache, index_cache = caches
    rows = (int32(0, new, new + 2), int32(first, 0), int32(kv_len, 0), torch.stack((order, 0 * order)).int())
    out = indexed_attention(
        q, k_cache, v_cache, index_q, index_cache, norm, 1e-5, frequencies, 1.0, *rows, 0.3, BUDGET, RATIO
    )
    expected = defined(q, k, v, index_q, raw, norm, frequencies, kv_len, first)
    torch.testing.assert_close(out[:new].double(), expected, rtol=1e-4, atol=1e-5)
    assert not out[new:].any()  # a padding row
