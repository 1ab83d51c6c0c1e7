"""The memory that kernels use while they run, beside their arguments and results, as functions of plain numbers.

A native kernel keeps its scratch from call to call, as much as the greediest call needed. All threads share some of it,
and each has some of its own. A reference frees what it allocates.
"""

from __future__ import annotations

from typing import NamedTuple

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
    EPILOGUE_ROWS,
    I16_TOKEN_PADDING,
    L2_TOKEN_BYTES,
    MAX_GROUP_TOKENS,
    MAX_I16_BLOCK_TOKENS_AVX2,
    MAX_I16_BLOCK_TOKENS_AVX512,
    MAX_I16_INT8_TOKENS,
    MAX_SPLIT_ROWS,
    MIN_GROUP_TOKENS,
    MIN_PANEL_TOKENS,
    PANEL_BYTES,
    SAMPLE_BLOCK,
    SCAN_HEADS,
    TILE_GROUP_BYTES,
    TILED_SCAN_CHUNK,
    VECTOR,
)

FLOAT = 4
"""Bytes."""

TILE_INPUTS = 2 * VECTOR
"""bfloat16 of a tile's row."""

TILE_WORK = EPILOGUE_ROWS * AMX_PANEL_K + 4 * VECTOR * VECTOR
"""Floats of a thread that uses matrix units: a panel of 32 rows as bfloat16, and four tiles of sums."""


class Scratch(NamedTuple):
    """Bytes: of all threads together, and of each thread."""

    shared: int
    own: int = 0


def native_linear(*, tokens: int, in_size: int, in_order: bool) -> Scratch:
    """Of all threads: the tokens that are packed, or copied, at a time. Of each: their sums with a panel of each of
    four streams, and a row of each that is made wide, or a panel of rows; or, below MIN_PANEL_TOKENS, also the
    vectors that become such sums, and a span of eight rows; and with `in_order` tokens in the order of the weights'
    inputs.

    With AVX2 alone: tokens in whole spans, and of each thread their sums with a panel, and that panel; or all that with
    16-bit integers in pairs, of which each 32 have a scale and a sum in tokens, and in panels two scales and a minimum.
    Of a few such tokens each thread has its own.

    On matrix units: tokens packed as bfloat16 in whole tiles, and of each thread their sums with 32 rows. Every
    processor is counted as if it worked in all these ways."""
    at_once = min(tokens, max(_grouped_tokens(in_size), MAX_GROUP_TOKENS))
    inputs = padded(in_size, TILE_INPUTS)
    packed = min(padded(tokens), _tiled_tokens(in_size))
    span = max(AVX2_PANEL_K, I16_TOKEN_PADDING // 2 + 3 * I16_TOKEN_PADDING // 32)
    panel = AVX2_PANEL_VECTORS * AVX2_LANES * (at_once + span)
    wide = 4 * (2 * VECTOR * min(tokens, MIN_PANEL_TOKENS) + DEQUANT_SPAN + 2 * VECTOR)
    own = max(
        4 * (at_once * EPILOGUE_ROWS + max(padded(in_size), PANEL_BYTES // 16)),
        wide,
        panel,
        packed * 2 * EPILOGUE_ROWS + TILE_WORK,
    )
    max_i16_tokens = max(MAX_I16_INT8_TOKENS, MAX_I16_BLOCK_TOKENS_AVX2, MAX_I16_BLOCK_TOKENS_AVX512)
    own += min(tokens, max_i16_tokens) * _fixed_floats(in_size)
    own += min(tokens, MAX_GROUP_TOKENS) * padded(in_size) if in_order else 0
    spans = max(padded(in_size, AVX2_PANEL_K), _fixed_floats(in_size))
    return Scratch(max(FLOAT * at_once * spans, 2 * packed * inputs), FLOAT * own)


def native_moe(*, tokens: int, size: int, inner: int, num_experts: int, experts_per_token: int) -> Scratch:
    """Of all threads: the tokens, once for every choice; what is between the two products, and where tokens become
    16-bit integers both these and what they are made of; the sums of each token. (The router needs less.) Of each
    thread: the order of all choices, the sums of those that it multiplies at a time, and four rows that are made wide.

    Matrix units take no more for all threads: they run if there are 16 choices or more for each expert, so that whole
    tiles hold at most twice the choices, and each in half the bytes."""
    places = tokens * experts_per_token
    apart = 3 * VECTOR * 2  # whole vectors, and an odd number of cache lines
    as_integers = _fixed_floats(size) + (inner + apart) // 2 + _fixed_floats(inner)
    shared = tokens * (size + apart) + places * max(size + inner + 2 * apart, as_integers)
    scores = tokens * padded(num_experts)
    at_once = max(
        min(places, max(_grouped_tokens(size), _grouped_tokens(inner))),
        min(padded(places), _tiled_tokens(max(size, inner))),
    )
    own = at_once * 2 * EPILOGUE_ROWS + padded(places + num_experts + 1) + TILE_WORK + 4 * (max(size, inner) + apart)
    return Scratch(FLOAT * max(shared, scores), FLOAT * own)


def native_attention(*, num_heads: int, num_kv_heads: int, head_dim: int, max_model_len: int, threads: int) -> Scratch:
    """Of all threads: the sums of units that several of them share. Of each: as for an encoder's attention."""
    dim, rows = padded(head_dim), padded(max(ATTENTION_UNIT_ROWS, num_heads // num_kv_heads))
    shared = threads * (max_model_len // ATTENTION_TILE + 1) * MAX_SPLIT_ROWS * (dim + 2)
    own = rows * (3 * dim + ATTENTION_TILE + 4) + 2 * ATTENTION_TILE * dim
    return Scratch(FLOAT * shared, FLOAT * own)


def native_encoder_attention(*, head_dim: int) -> Scratch:
    """A thread's queries with their scores and sums, and a tile of keys and values."""
    dim = padded(head_dim)
    return Scratch(0, FLOAT * (ATTENTION_UNIT_ROWS * (3 * dim + ATTENTION_TILE + 2) + 2 * ATTENTION_TILE * dim))


def native_ssd_scan(*, chunk_size: int, head_dim: int, state_size: int) -> Scratch:
    """A thread's states of some heads and one more, and what it makes of a chunk.

    On matrix units: a chunk's operands as bfloat16, and the sums of a panel of 32 columns. Every processor is counted
    as if it had them."""
    chunk = padded(min(chunk_size, TILED_SCAN_CHUNK), TILE_INPUTS)
    dim, state = padded(head_dim), padded(state_size, TILE_INPUTS)
    floats = (SCAN_HEADS + 1) * state * dim + chunk * (2 * state + 3 * chunk + 3 * dim + 4) + state + dim
    operands = chunk * (3 * state + 4 * dim + 4 * TILE_INPUTS)
    return Scratch(0, FLOAT * (floats + 2 * chunk * TILE_INPUTS) + 2 * operands)


def native_delta_scan(*, key_dim: int, value_dim: int) -> Scratch:
    """A thread's state of one head, and what it makes of the tokens of a span."""
    token = 4 * padded(key_dim) + padded(value_dim, DELTA_COLUMNS) + VECTOR
    return Scratch(0, FLOAT * (DELTA_SPAN * token + key_dim * padded(value_dim, DELTA_COLUMNS)))


def native_sample(*, positions: int, vocab_size: int) -> Scratch:
    """The maxima of all blocks of logits; and for each thread a row, ordered."""
    return Scratch(FLOAT * positions * -(-vocab_size // SAMPLE_BLOCK), FLOAT * 3 * vocab_size)


def reference_attention(*, tokens: int, kv_elements: int, kv_bytes: int, max_model_len: int) -> Scratch:
    """Of one row at a time: its gathered keys and values, `kv_elements` of `kv_bytes` each per token; and a slab's
    causal mask, as bool and as float32."""
    gathered = max_model_len * kv_elements * kv_bytes
    return Scratch(gathered + min(tokens, ATTENTION_SLAB, max_model_len) * max_model_len * (1 + FLOAT))


def reference_gather_inputs(*, tokens: int, elements: int) -> Scratch:
    """The inputs of all ranks, `elements` of each token: as each sent them, and side by side. In float32, whatever the
    dtype."""
    return Scratch(2 * FLOAT * tokens * elements)


def reference_ssd_scan(
    *, num_heads: int, num_groups: int, chunk_size: int, state_elements: int, states: int
) -> Scratch:
    """Of one chunk: decay and weights [heads, chunk, chunk] and scores [groups, chunk, chunk]; and three copies of
    `states` SSM states (before, added, after); all in float32."""
    chunk = (2 * num_heads + num_groups) * chunk_size**2
    return Scratch(FLOAT * (chunk + 3 * states * state_elements))


def reference_delta_scan(*, num_heads: int, key_dim: int, value_dim: int, per_channel: bool) -> Scratch:
    """Of one chunk: decays, their logarithms in float64, and scores, for each pair of tokens, per head or key channel;
    keys, queries and values, decayed and not; and three copies of a state (before, added, after)."""
    chunk = DELTA_CHANNEL_CHUNK if per_channel else DELTA_CHUNK
    pairs = chunk**2 * (4 * (key_dim if per_channel else 1) + 2)
    return Scratch(FLOAT * num_heads * (pairs + 4 * chunk * (key_dim + value_dim) + 3 * key_dim * value_dim))


def reference_selective_scan(*, tokens: int, channels: int, state_elements: int, states: int) -> Scratch:
    """Of all tokens: x, steps, products of both and sums; and four copies of `states` states (before, decays, outputs
    and as they are kept); all in float32."""
    return Scratch(FLOAT * (4 * tokens * channels + 4 * states * state_elements))


def reference_quantized(*, elements: int) -> Scratch:
    """Of 8-bit weights of so many elements: a slab, and its scales spread out, in float32."""
    return Scratch(2 * FLOAT * min(DEQUANT_SLAB, elements))


def padded(size: int, unit: int = VECTOR) -> int:
    """`size` floats in whole vectors, or in other units."""
    return -(-size // unit) * unit


def _fixed_floats(size: int) -> int:
    """Floats of a token in 16-bit integers, with a scale and a sum per 32 (`native/quant/quantize_tokens_i16.h`)."""
    return padded(size, I16_TOKEN_PADDING) * 9 // 16


def _grouped_tokens(in_size: int) -> int:
    """Tokens that a product takes together, where an element of them may have as little as two bytes."""
    return max(L2_TOKEN_BYTES // (2 * in_size), MIN_GROUP_TOKENS)


def _tiled_tokens(in_size: int) -> int:
    """Tokens that matrix units take together, at the most."""
    return max(TILE_GROUP_BYTES // (2 * padded(in_size, TILE_INPUTS)) // VECTOR, 2) * VECTOR
