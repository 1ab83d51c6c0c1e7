"""Sizes of the kernels' tiles, slabs, blocks and integers.

Plain numbers and nothing else. The plan reads them without torch, and the build gives C++ each whole number as a
constant of the same name (`cmake/write_constants.py`).
"""

from __future__ import annotations

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes of an element by dtype."""

VECTOR = 16
"""Floats of the widest vector. Scratch is padded to whole vectors of it."""

L2_TOKEN_BYTES = 512 * 1024
"""Bytes of the tokens that a matmul takes together while it streams rows of weights: they stay in an L2 cache."""

MIN_GROUP_TOKENS = 24
"""Smallest number of tokens that a matmul takes together, however large they are."""

MAX_GROUP_TOKENS = 512
"""Tokens whose sums a large-m matmul keeps at a time: 128 KiB, which stay in an L2 cache."""

AVX2_PANEL_K = 128
"""Inputs of 16 rows of weights in one panel on processors with AVX2 alone: 8 KiB.

A panel stays in an L1 cache, with the tokens that pass by.
"""

AVX2_LANES = 8
"""Floats of an AVX2 vector."""

AVX2_PANEL_VECTORS = 2
"""Vectors of outputs in an AVX2 panel."""

I16_SCALE_SPAN = 64
"""Largest number of inputs of an i16 token that share one scale, with AVX2 vectors."""

I16_TOKEN_PADDING = 256
"""Inputs that an i16 token, and a panel that it is multiplied with, are padded to.

They cover all of a block, or several blocks whose scales are prepared together.
"""

I16_NR = 4
"""Largest number of i16 tokens that are multiplied with some rows at a time."""

MAX_I16_INT8_TOKENS = 8
"""Largest number of i16 tokens that are multiplied with rows of 8-bit weights, of a scale per row, in row streams.

More tokens are multiplied with panels.
"""

MAX_I16_BLOCK_TOKENS_AVX2 = 3
"""Largest number of i16 tokens that are multiplied with weights in blocks in row streams, with AVX2 vectors.

On an AMD EPYC (Zen 3, one thread), 4096 x 1024, in GFLOP/s, in row streams and in panels: with 4 tokens int8 70 and 51,
Q4_0 43 and 49, Q6_K 32 and 37; with 8 tokens 68 and 66, 43 and 62, 30 and 45; with 12 tokens 69 and 74, 42 and 72, 32
and 56. bfloat16 has 49.
"""

MAX_I16_BLOCK_TOKENS_AVX512 = 8
"""Largest number of i16 tokens that are multiplied with weights in blocks, with vectors of 512 bits.

More tokens become float32. On an AMD EPYC (Zen 4, one thread, without its bfloat16 instructions), cycles for 32
weights, in float32 and in i16: Q4_K 11.7 and 4.4 with one token, 37 and 23 with 8; Q5_0 13 and 6, 30 and 27, but 36 and
40 with 12.
"""

PANEL_BYTES = 32 * 1024
"""Bytes of weights that are transposed for large-m matmuls with vectors of 512 bits: two thirds of an L1 cache.

Sizes from 16 to 128 KiB make no difference.
"""

MIN_PANEL_TOKENS = 72
"""Smallest number of bfloat16 tokens for which weights are transposed into panels.

This holds on processors that multiply bfloat16 in vectors; 8-bit weights with a scale per group are transposed earlier.
"""

MIN_DEQUANT_TOKENS = 6
"""Smallest number of bfloat16 tokens for which rows of weights are converted to bfloat16 once for all tokens.

This holds for 8-bit weights and weights in blocks, up to `MIN_PANEL_TOKENS`. On an AMD EPYC (Zen 4, one thread,
weights from memory), ns for 32 weights, converted for each block of tokens and once: int8 2.0 and 2.3 with 3 tokens,
2.9 and 2.6 with 6, 6.2 and 5.9 with 16, 12.6 and 10.7 with 32; Q4_K 2.4 and 2.4, 3.1 and 3.0, 7.9 and 6.1, 14 and 11.2;
Q8_0 2.9 and 2.9, 3.8 and 3.3, 7.9 and 6.4, 15 and 11.8.
"""

DEQUANT_SPAN = 1024
"""Inputs of four rows of weights that are converted to bfloat16 at a time: 8 KiB.

They are converted while the four rows before are multiplied, on processors that multiply bfloat16 in vectors. Both stay
in an L1 cache, with the tokens that pass by.

On an AMD EPYC (Zen 4, one thread), 8-bit weights from memory, ns for 32 of them with 8 tokens: whole rows of 1024
inputs take 3.1, of 1536 4.5, of 4096 5.4; in spans these take 3.4.
"""

EPILOGUE_ROWS = 16
"""Rows of weights whose sums are kept for all tokens before they are written."""

MIN_AMX_TOKENS = 6
"""Smallest number of tokens for which bfloat16 matmuls run on matrix units, on processors that have such units.

Up to 16 tokens take as long as one there. On an Intel Xeon (two threads of one core; `tools/compare_products.py`), 4096
x 4096, in GFLOP/s on vectors and on tiles: 144 and 110 with 3 tokens, 182 and 184 with 5, 195 and 221 with 6, 165 and
307 with 8. With 8-bit weights in groups of 128 they are even at 4.
"""

MIN_AMX_EXPERT_TOKENS = 16
"""Smallest average number of tokens per expert for which a layer's experts run on matrix units.

An expert's tokens fill separate tiles; this minimum bounds the number of tiles that stay half empty.
"""

AMX_PANEL_K = 128
"""Inputs of 32 rows of weights that are copied for matrix units at a time: 8 KiB.

They stay in an L1 cache, which two threads may share, with the tokens that pass by.
"""

TILE_GROUP_BYTES = 1024 * 1024
"""Bytes of the tokens that matrix units take together: half of such a processor's L2 cache."""

ATTENTION_TILE = 128
"""Keys that attention takes at a time."""

MIN_AMX_QUERIES = 5
"""Smallest number of a row's queries per key head for which bfloat16 attention runs on matrix units.

It counts the row's tokens times the heads of a group, and holds if the processor has matrix units. On two cores of a
Xeon with AMX, 24 calls for 8 rows of 128 tokens, 8 key heads of 128: with 2 queries vectors take 3.6 ms and matrix
units 5.0, with 4 both take 5.2, with 6 they take 6.9 and 5.2, with 8 8.9 and 5.6.
"""

ATTENTION_UNIT_ROWS = 256
"""Query rows that attention takes at a time, in a vision encoder too.

With this many rows, packing a tile costs little compared with using it.
"""

MAX_SPLIT_ROWS = 32
"""Largest number of query rows of an attention unit whose keys several threads may share.

Each thread keeps their sums for each tile, and that must stay small.
"""

SCAN_HEADS = 4
"""Heads that a thread scans at a time."""

SCAN_CHUNK = 16
"""Largest number of tokens that the native scan takes as one chunk.

It keeps the states of some heads in a core's cache, so that a pass over one costs little.
"""

TILED_SCAN_CHUNK = 32
"""Largest number of tokens of a chunk on matrix units, with states in float32: the inputs of a tile."""

DELTA_CHUNK = 64
"""Largest number of tokens that the reference of a delta net's scan takes as one chunk."""

DELTA_CHANNEL_CHUNK = 16
"""Largest chunk of that reference with a decay per key channel, which makes one number per pair of tokens and channel.
"""

DELTA_COLUMNS = 32
"""Value channels of a delta net's head that the native kernels take at a time.

With 128 key channels their state takes 16 KiB, which stay in an L1 cache.
"""

DELTA_SPAN = 32
"""Tokens whose keys and queries the native scan prepares at a time, for all columns of a head."""

SAMPLE_BLOCK = 256
"""Logits in a block with one maximum."""

ATTENTION_SLAB = 256
"""Tokens of a prompt chunk that attend at a time in the reference, which bounds the rows of a causal mask."""

DEQUANT_SLAB = 2**22
"""Elements of 8-bit weights that a reference dequantizes at a time."""

MAX_INT8 = 127
"""Largest integer of weights, keys and values of 8 bits. The least is -127, so that scales are symmetric."""

MAX_INT4 = 15
"""Largest integer of 4-bit weights; the least is 0."""

INT4_ZERO_BITS = 0xFF
"""Mask of the zero point in the first 32 bits of an int4 block."""

INT4_STEPS = 8
"""Scales that are tried for a group of 4-bit weights.

The first spans the group's range, and each next one spans `INT4_SHRINK` percent of that range less. Twice as many, or
zero points besides the nearest, take off another 1 % of the squared error of normally distributed weights; these take
off 8 %.
"""

INT4_SHRINK = 5


def chunk_length(chunk_size: int, longest: int) -> int:
    """Return the tokens per chunk of a scan: the largest divisor of the model's `chunk_size` up to `longest`."""
    return next(n for n in range(min(chunk_size, longest), 0, -1) if chunk_size % n == 0)
