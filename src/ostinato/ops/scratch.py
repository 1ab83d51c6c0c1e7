"""Scratch memory of kernels, besides their arguments and results, as functions of plain numbers.

A native kernel keeps its scratch from call to call, at the size of the largest call so far. Some of it is shared by all
threads, some is per thread. A reference frees what it allocates, and so does a Triton kernel when the call returns; the
latter is counted as the most that a launch table may choose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from ostinato.ops.launch_tables.attention import MAX_SEGMENTS, PROGRAMS
from ostinato.ops.launch_tables.pointwise import num_blocks
from ostinato.ops.launch_tables.state import DELTA_TOKENS
from ostinato.ops.sizes import (
    AMX_PANEL_K,
    ATTENTION_SLAB,
    ATTENTION_TILE,
    ATTENTION_UNIT_ROWS,
    AVX2_LANES,
    AVX2_PANEL_K,
    AVX2_PANEL_VECTORS,
    DELTA_CHANNEL_CHUNK,
    DELTA_CHUNK,
    DELTA_COLUMNS,
    DELTA_SPAN,
    DEQUANT_SLAB,
    DEQUANT_SPAN,
    DTYPE_BYTES,
    EPILOGUE_ROWS,
    I16_TOKEN_PADDING,
    INDEX_GROUP_TOKENS,
    INDEX_HEADS_AT_ONCE,
    INDEX_KEY_VECTORS,
    INDEX_SLAB,
    INT8_PANEL_K,
    L2_TOKEN_BYTES,
    MAX_GROUP_TOKENS,
    MAX_PACKED_ALONE,
    MAX_SPLIT_ROWS,
    MIN_GROUP_TOKENS,
    PANEL_BYTES,
    SAMPLE_BLOCK,
    SCAN_HEADS,
    TILE_GROUP_BYTES,
    TILED_SCAN_CHUNK,
    VECTOR,
)
from ostinato.ops.ukernels import BF16, ROWS_OF, Ukernel

FLOAT_BYTES = DTYPE_BYTES["float32"]
"""Bytes of a float."""

TILE_INPUTS = 2 * VECTOR
"""Bfloat16 values of a tile's row."""

TILE_WORK = EPILOGUE_ROWS * AMX_PANEL_K + 4 * VECTOR * VECTOR
"""Floats of a thread that uses matrix units: a panel of 32 rows as bfloat16, and four tiles of sums."""


class Scratch(NamedTuple):
    """Bytes shared by all threads, and bytes of each thread."""

    shared: int
    own: int = 0


def native_linear(
    *,
    tokens: int,
    in_size: int,
    in_order: bool,
    linear_rows: Collection[Ukernel] = ROWS_OF["linear"],
    group_size: int = 0,
) -> Scratch:
    """Return the scratch of the native `linear`: the most of the rows that may compute it.

    `linear_rows` are the rows of the table (`ops/ukernels.py`) for the module, types and weights, all by default. Each
    counts with as many tokens as it takes. `group_size` inputs share a scale of 8-bit weights; 0: a row. A
    thread keeps memory for floats, for vectors and for integers apart; with `in_order` also tokens in the order of the
    weights' inputs.
    """
    needed = []
    for row in linear_rows:
        if row.min_m <= tokens:
            m = tokens if row.max_m is None else min(tokens, row.max_m)
            of_row = _LINEAR_SCRATCH[row.driver](m, in_size, group_size)
            in_place = row.driver == "LARGE_M" and row.lhs == BF16 and in_size % 4 == 0  # whole units are not copied
            needed.append(of_row._replace(shared=0) if in_place else of_row)
    kinds = ("floats", "vectors", "integers", "alone")
    own = sum(max((getattr(each, kind) for each in needed), default=0) for kind in kinds)
    own += min(tokens, MAX_GROUP_TOKENS) * padded(in_size) if in_order else 0
    return Scratch(max((each.shared for each in needed), default=0), FLOAT_BYTES * own)


class _DriverScratch(NamedTuple):
    """Scratch of a driver: bytes that threads share, and floats of a thread by the type of the memory.

    `alone` are those of few tokens, which each thread packs for itself.
    """

    shared: int = 0
    floats: int = 0
    vectors: int = 0
    integers: int = 0
    alone: int = 0


def _amx_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count tokens packed as bfloat16 in whole tiles; a thread has their sums with 32 rows, and a panel of these."""
    packed = min(padded(tokens), _tiled_tokens(in_size))
    return _DriverScratch(2 * packed * padded(in_size, TILE_INPUTS), packed * 2 * EPILOGUE_ROWS + TILE_WORK)


def _gemv_i16_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count each thread's own tokens as integers, and their sums with a panel of each of four streams.

    One token that is not finite is packed as floats.
    """
    floats = _small_m_scratch(1, in_size, 0)
    return floats._replace(floats=tokens * 4 * EPILOGUE_ROWS, integers=tokens * _fixed_floats(in_size))


def _avx2_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count tokens in whole spans; a thread has their sums with a panel, and that panel."""
    tokens = min(tokens, MAX_GROUP_TOKENS)
    outputs = AVX2_PANEL_VECTORS * AVX2_LANES
    return _DriverScratch(FLOAT_BYTES * tokens * padded(in_size, AVX2_PANEL_K), 0, outputs * (tokens + AVX2_PANEL_K))


def _i16_scratch(tokens: int, in_size: int, outputs: int, not_finite: _DriverScratch) -> _DriverScratch:
    """Count tokens in pairs of integers, with two scales and a minimum for each 32; or as floats, if not finite."""
    at_once = min(tokens, MAX_GROUP_TOKENS)
    span = I16_TOKEN_PADDING // 2 + 3 * I16_TOKEN_PADDING // 32
    shared = max(FLOAT_BYTES * at_once * _fixed_floats(in_size), not_finite.shared)
    return not_finite._replace(shared=shared, vectors=max(outputs * (at_once + span), not_finite.vectors))


def _avx2_i16_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    return _i16_scratch(tokens, in_size, AVX2_PANEL_VECTORS * AVX2_LANES, _avx2_scratch(tokens, in_size, 0))


def _vnni_i16_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    return _i16_scratch(tokens, in_size, 4 * VECTOR, _small_m_scratch(min(tokens, MAX_GROUP_TOKENS), in_size, 0))


def _dequant_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count packed tokens; a thread has vectors that become sums, the sums, and a span of eight rows as bfloat16."""
    at_once = min(tokens, _grouped_tokens(in_size))
    own = 4 * (2 * VECTOR * at_once + DEQUANT_SPAN + 2 * VECTOR)
    return _DriverScratch(2 * at_once * padded(in_size, TILE_INPUTS), own)


def _large_m_scratch(tokens: int, in_size: int, group_size: int) -> _DriverScratch:
    """Count copied tokens; a thread has their sums with a panel of rows, and that panel."""
    tokens = min(tokens, MAX_GROUP_TOKENS)
    panel = 4 * VECTOR * max(PANEL_BYTES // (4 * VECTOR * FLOAT_BYTES), padded(min(in_size, group_size)))
    return _DriverScratch(FLOAT_BYTES * tokens * padded(in_size, TILE_INPUTS), 0, panel + tokens * 4 * VECTOR)


def _small_m_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count packed tokens; a thread has their sums with a panel of four streams each, and four dequantized rows."""
    at_once = min(tokens, _grouped_tokens(in_size))
    row = padded(in_size, TILE_INPUTS)
    few = min(at_once, MAX_PACKED_ALONE // in_size)
    shared = FLOAT_BYTES * at_once * row if few < at_once else 0
    return _DriverScratch(shared, 4 * (at_once * EPILOGUE_ROWS + row), alone=few * row)


def _int8_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count tokens as int8, an odd number of cache lines each, with scales; a thread has their sums, and a panel."""
    tokens = min(tokens, MAX_GROUP_TOKENS)
    vectors = PANEL_BYTES // FLOAT_BYTES + 4 * VECTOR * tokens
    return _DriverScratch(tokens * (padded(in_size, 64) + 64) + 8 * padded(tokens), 0, vectors)


def _int8_amx_scratch(tokens: int, in_size: int, _: int) -> _DriverScratch:
    """Count the same and a copy in tiles; a thread has their sums with 32 rows, and a panel of these."""
    packed = min(padded(tokens), max(TILE_GROUP_BYTES // (VECTOR * padded(in_size, 64)), 2) * VECTOR)
    row = 2 * padded(in_size, 64) + 64
    return _DriverScratch(packed * (row + 8), 2 * EPILOGUE_ROWS * (INT8_PANEL_K // FLOAT_BYTES + packed))


_LINEAR_SCRATCH: dict[str, Callable[[int, int, int], _DriverScratch]] = {
    "LARGE_M_AMX": _amx_scratch,
    "INT8_VNNI": _int8_scratch,
    "INT8_AMX": _int8_amx_scratch,
    "GEMV_I16": _gemv_i16_scratch,
    "LARGE_M_AVX2": _avx2_scratch,
    "LARGE_M_I16_AVX2": _avx2_i16_scratch,
    "LARGE_M_I16_VNNI": _vnni_i16_scratch,
    "MID_M_DEQUANT_BF16": _dequant_scratch,
    "LARGE_M": _large_m_scratch,
    "SMALL_M_ROUNDED": _small_m_scratch,
    "SMALL_M_DEQUANT": _small_m_scratch,
    "SMALL_M": _small_m_scratch,
}


def native_moe(
    *,
    tokens: int,
    size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    moe_rows: Collection[Ukernel] = ROWS_OF["moe"],
    linear_rows: Collection[Ukernel] = ROWS_OF["linear"],
    group_size: int = 0,
) -> Scratch:
    """Return the scratch of the native `moe`: the most of the rows that may compute it (and of the router).

    Shared: for every choice the values between the two matmuls, and its results, whose place its token has before. Per
    thread: the order of all choices, and what a row of `linear` takes for an expert that all tokens chose, as each
    thread multiplies alone.

    Matrix units pack choices in half the bytes, in at most twice the places, as they run if there are 16 choices or
    more for each expert on average; and they add each token's sums.
    """
    places = tokens * top_k
    apart = 3 * VECTOR * 2  # Whole vectors, and an odd number of cache lines.
    shared = max(places * (size + intermediate_size + 2 * apart), tokens * padded(num_experts + VECTOR))
    multiplied = [
        native_linear(tokens=tokens, in_size=k, in_order=False, linear_rows=linear_rows, group_size=group_size)
        for k in (size, intermediate_size)
    ]
    own = max(each.shared for each in multiplied) + max(each.own for each in multiplied)
    if any(row.driver == "MOE_AMX" for row in moe_rows):
        shared += tokens * (size + apart)
        tiled = min(padded(places), _tiled_tokens(max(size, intermediate_size)))
        own = max(own, FLOAT_BYTES * (tiled * 2 * EPILOGUE_ROWS + TILE_WORK + padded(places + num_experts + 1)))
    own += FLOAT_BYTES * (2 * places + tokens + 2 * num_experts + 1)
    return Scratch(FLOAT_BYTES * shared, own)


def native_attention(*, num_heads: int, num_kv_heads: int, head_dim: int, max_model_len: int, threads: int) -> Scratch:
    """Return the scratch of the native `attention`.

    Shared: the sums of units that several threads share. Per thread: as for an encoder's attention.
    """
    rows = padded(max(ATTENTION_UNIT_ROWS, num_heads // num_kv_heads))
    shared = threads * (max_model_len // ATTENTION_TILE + 1) * MAX_SPLIT_ROWS * (padded(head_dim) + 2)
    return Scratch(FLOAT_BYTES * shared, _tile_scratch(rows, head_dim))


def native_indexed_attention(
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    index_dim: int,
    index_ratio: int,
    max_model_len: int,
) -> Scratch:
    """Return the scratch of the native `indexed_attention`.

    Shared: the scores of all blocks for the tokens that select at a time. Per thread: one token's order of blocks in 64
    bits, and either some blocks' keys or the queries of a head of keys, with their scores and sums.
    """
    blocks, dim = max_model_len // index_ratio, padded(head_dim)
    keys = (VECTOR + INDEX_HEADS_AT_ONCE + INDEX_KEY_VECTORS) * padded(index_dim)
    own = max(keys, num_heads // num_kv_heads * (3 * dim + ATTENTION_TILE + 4))
    scores = padded(blocks) * min(tokens, INDEX_GROUP_TOKENS)
    return Scratch(FLOAT_BYTES * scores, FLOAT_BYTES * own + DTYPE_BYTES["int64"] * blocks)


def native_encoder_attention(*, head_dim: int) -> Scratch:
    """Return the scratch of a thread: its queries with their scores and sums, and a tile of keys and values."""
    return Scratch(0, _tile_scratch(ATTENTION_UNIT_ROWS, head_dim))


def _tile_scratch(rows: int, head_dim: int) -> int:
    """Return the bytes of `TileScratch` (native/attention/packed.h)."""
    dim = padded(head_dim)
    return FLOAT_BYTES * (rows * (3 * dim + ATTENTION_TILE + 4) + 2 * ATTENTION_TILE * dim)


def native_ssd_scan(*, chunk_size: int, head_dim: int, state_size: int) -> Scratch:
    """Return the scratch of a thread: its states of some heads and one more, and its intermediate values of a chunk.

    On matrix units it also has a chunk's operands as bfloat16, and the sums of a panel of 32 columns. Every processor
    is counted as if it had matrix units.
    """
    chunk = padded(min(chunk_size, TILED_SCAN_CHUNK), TILE_INPUTS)
    dim, state = padded(head_dim), padded(state_size, TILE_INPUTS)
    floats = (SCAN_HEADS + 1) * state * dim + chunk * (2 * state + 3 * chunk + 3 * dim + 4) + state + dim
    operands = chunk * (3 * state + 4 * dim + 4 * TILE_INPUTS)
    return Scratch(0, FLOAT_BYTES * (floats + 2 * chunk * TILE_INPUTS) + 2 * operands)


def native_delta_scan(*, key_dim: int, value_dim: int) -> Scratch:
    """Return the scratch of a thread: its state of one head, and its intermediate values for the tokens of a span."""
    token = 4 * padded(key_dim) + padded(value_dim, DELTA_COLUMNS) + VECTOR
    return Scratch(0, FLOAT_BYTES * (DELTA_SPAN * token + key_dim * padded(value_dim, DELTA_COLUMNS)))


def native_sample(*, positions: int, vocab_size: int) -> Scratch:
    """Return the maxima of all blocks of logits as shared scratch, and one row in order for each thread."""
    return Scratch(FLOAT_BYTES * positions * -(-vocab_size // SAMPLE_BLOCK), FLOAT_BYTES * 3 * vocab_size)


def reference_attention(
    *,
    tokens: int,
    kv_elements: int,
    kv_bytes: int,
    max_model_len: int,
    num_heads: int = 1,
    has_sinks: bool = False,
    softcap: float | None = None,
) -> Scratch:
    """Return the memory of one row: its gathered keys and values, and the causal mask of a slab.

    A token has `kv_elements` elements of `kv_bytes` each. The mask exists as bool and as float32. With sinks, keys and
    values exist twice, and every head has a mask of its own, twice while a column is added to it. torch then computes
    all scores of a slab at once, and their softmax. With a `softcap` it does so too, from keys and values in float32.
    """
    copies, masks = (2, 4 * num_heads) if has_sinks else (1, 1)
    gathered = copies * max_model_len * kv_elements * kv_bytes
    if softcap is not None:
        masks, gathered = 4 * num_heads, gathered + max_model_len * kv_elements * FLOAT_BYTES
    masked = min(tokens, ATTENTION_SLAB, max_model_len) * max_model_len
    return Scratch(gathered + masked * (1 + masks * FLOAT_BYTES))


def reference_indexed_attention(
    *,
    tokens: int,
    kv_elements: int,
    kv_bytes: int,
    max_model_len: int,
    num_heads: int,
    index_heads: int,
    index_dim: int,
    index_ratio: int,
) -> Scratch:
    """Return the memory of one row: what `reference_attention` gathers, and the selection of a slab of tokens.

    The indexer's pooled keys exist four times in float32. A slab has the scores of all heads twice, their order in 64
    bits, and the masks.
    """
    plain = reference_attention(
        tokens=tokens, kv_elements=kv_elements, kv_bytes=kv_bytes, max_model_len=max_model_len, num_heads=num_heads
    )
    blocks = -(-max_model_len // index_ratio)
    pooled = (max_model_len + 4 * blocks) * index_dim * FLOAT_BYTES
    of_block = (2 * index_heads + 3) * FLOAT_BYTES + 8 + 3
    slab = min(tokens, INDEX_SLAB, max_model_len) * (blocks * of_block + max_model_len * (4 + FLOAT_BYTES))
    return Scratch(plain.shared + pooled + slab)


def reference_select_blocks(
    *, tokens: int, kv_bytes: int, max_model_len: int, index_heads: int, index_dim: int, index_ratio: int
) -> Scratch:
    """Return the memory of one row: its gathered entries, shares and keys of blocks, and the selection of a slab.

    An entry is a key and its gates. The shares exist twice in float32 and once in the dtype of the keys, multiplied
    with them too. A slab has the scores of all heads twice, their order in 64 bits, and masks.
    """
    blocks = -(-max_model_len // index_ratio)
    pooled = max_model_len * index_dim * (4 * kv_bytes + 2 * FLOAT_BYTES) + blocks * index_dim * (
        kv_bytes + FLOAT_BYTES
    )
    of_block = (2 * index_heads + 4) * FLOAT_BYTES + 8 + 3
    return Scratch(pooled + min(tokens, INDEX_SLAB, max_model_len) * blocks * of_block)


def reference_selected_attention(
    *, tokens: int, kv_elements: int, kv_bytes: int, max_model_len: int, num_heads: int
) -> Scratch:
    """Return the memory of one row: what `reference_attention` gathers, and the masks of a slab."""
    plain = reference_attention(
        tokens=tokens, kv_elements=kv_elements, kv_bytes=kv_bytes, max_model_len=max_model_len, num_heads=num_heads
    )
    return Scratch(plain.shared + min(tokens, INDEX_SLAB, max_model_len) * max_model_len * (4 + FLOAT_BYTES))


def reference_gather_act_order(*, tokens: int, elements: int) -> Scratch:
    """Return the memory of all ranks' inputs, `elements` per token: as each rank sent them, and concatenated.

    They are counted in float32, whatever the dtype.
    """
    return Scratch(2 * FLOAT_BYTES * tokens * elements)


def reference_ssd_scan(
    *, num_heads: int, num_groups: int, chunk_size: int, state_elements: int, states: int
) -> Scratch:
    """Return the memory of one chunk and three copies of `states` SSM states (before, added, after), all in float32.

    The chunk has decay and weights [heads, chunk, chunk] and scores [groups, chunk, chunk].
    """
    chunk = (2 * num_heads + num_groups) * chunk_size**2
    return Scratch(FLOAT_BYTES * (chunk + 3 * states * state_elements))


def reference_delta_scan(*, num_heads: int, key_dim: int, value_dim: int, per_channel: bool) -> Scratch:
    """Return the memory of one chunk and three copies of a state (before, added, after).

    For each pair of tokens, per head or key channel, the chunk has decays, their logarithms in float64, and scores. It
    also has keys, queries and values, decayed and not.
    """
    chunk = DELTA_CHANNEL_CHUNK if per_channel else DELTA_CHUNK
    pairs = chunk**2 * (4 * (key_dim if per_channel else 1) + 2)
    return Scratch(FLOAT_BYTES * num_heads * (pairs + 4 * chunk * (key_dim + value_dim) + 3 * key_dim * value_dim))


def reference_selective_scan(*, tokens: int, channels: int, state_elements: int, states: int) -> Scratch:
    """Return the memory of all tokens and four copies of `states` states, all in float32.

    Tokens have x, steps, products of both and sums. The copies are states before the step, decays, outputs, and states
    rounded for the slots.
    """
    return Scratch(FLOAT_BYTES * (4 * tokens * channels + 4 * states * state_elements))


def reference_quantized(*, elements: int) -> Scratch:
    """Return the memory of a slab of 8-bit weights with `elements` elements, and its expanded scales, in float32."""
    return Scratch(2 * FLOAT_BYTES * min(DEQUANT_SLAB, elements))


def padded(size: int, unit: int = VECTOR) -> int:
    """Round `size` up to whole vectors, or to another `unit`."""
    return -(-size // unit) * unit


def _fixed_floats(size: int) -> int:
    """Return the floats that a token takes in 16-bit fixed-point (i16), padded to whole groups.

    Each 32 values have a scale and a sum (`native/quant/quantize_tokens_i16.h`).
    """
    return padded(size, I16_TOKEN_PADDING) * 9 // 16


def _grouped_tokens(in_size: int) -> int:
    """Return the number of tokens that a matmul takes together, if an element may have as little as two bytes."""
    return max(L2_TOKEN_BYTES // (2 * in_size), MIN_GROUP_TOKENS)


def _tiled_tokens(in_size: int) -> int:
    """Return the largest number of tokens that matrix units take together."""
    return max(TILE_GROUP_BYTES // (2 * padded(in_size, TILE_INPUTS)) // VECTOR, 2) * VECTOR


def triton_attention(*, tokens: int, rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Scratch:
    """Return the bytes for `tokens` tokens in decode `rows`: a sum, a maximum and a weight for each segment."""
    of_row = -(-tokens // max(rows, 1)) * num_heads // num_kv_heads
    segments = min(tokens * num_heads * MAX_SEGMENTS, of_row * PROGRAMS)
    return Scratch(segments * (head_dim + 2) * FLOAT_BYTES)


def triton_delta_scan(
    *, tokens: int, rows: int, num_heads: int, key_dim: int, value_dim: int, per_channel: bool
) -> Scratch:
    """Return the bytes that the pass along rows reads of each token and head, and a decay of each chunk.

    A token and head have two copies of the key, the query, the value and the scores. With `per_channel` a chunk has a
    decay per key channel.
    """
    chunks = tokens // DELTA_TOKENS + 2 * rows
    of_token = 3 * key_dim + value_dim + DELTA_TOKENS
    return Scratch(num_heads * (tokens * of_token + chunks * (key_dim if per_channel else 1)) * FLOAT_BYTES)


def triton_linear(
    *, tokens: int, out_size: int, element_bytes: int, in_size: int = 0, in_order: bool = False
) -> Scratch:
    """Return the bytes of a matmul's result before scale, activation and addition.

    With `in_order` the inputs count too: they are copied into the order of their weights first.
    """
    return Scratch(tokens * (out_size + (in_size if in_order else 0)) * element_bytes)


def triton_moe(*, tokens: int, size: int, inner_size: int, num_experts: int, top_k: int, element_bytes: int) -> Scratch:
    """Return the bytes of the choices in order of experts, and of each expert's values between and after matmuls."""
    choices = tokens * top_k
    scores = tokens * num_experts * FLOAT_BYTES
    return Scratch((choices + num_experts + 1) * FLOAT_BYTES + choices * (size + inner_size) * element_bytes + scores)


def triton_sample(*, positions: int, vocab_size: int) -> Scratch:
    """Return the bytes of each block's best logit and its index, and a few numbers of each row."""
    return Scratch(positions * (2 * num_blocks(vocab_size) + 16) * FLOAT_BYTES)
