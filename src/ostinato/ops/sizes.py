"""The sizes of the kernels' tiles, slabs and blocks, from which their scratch memory follows.

Plain numbers and nothing else. The plan reads them without torch, and the build gives C++ each of them as a constant of
the same name (`cmake/write_sizes.py`).
"""

from __future__ import annotations

VECTOR = 16
"""Floats of the widest vector. Scratch is padded to whole vectors of it."""

L2_TOKEN_BYTES = 512 * 1024
"""Bytes of the tokens that a matrix product takes together while rows of weights pass by: they stay in an L2 cache."""

MIN_GROUP_TOKENS = 24
"""Tokens that it takes together at least, however large they are."""

MAX_GROUP_TOKENS = 512
"""Tokens whose sums a product of many tokens keeps at a time: 128 KiB, which stay in an L2 cache."""

AVX2_PANEL_K = 128
"""Inputs of 16 rows of weights that are made a panel at a time on processors with AVX2 alone: 8 KiB. It stays in an L1
cache, with the tokens that pass by."""

AVX2_LANES = 8
"""Floats of a vector there."""

AVX2_PANEL_VECTORS = 2
"""Vectors of outputs that such a panel has."""

I16_SCALE_SPAN = 64
"""Inputs of a token in 16-bit integers that have one scale, at the most, where vectors are those of AVX2."""

I16_TOKEN_PADDING = 256
"""Inputs that such a token is padded to, and those of a panel that it is multiplied with: all of a block, or of several
whose scales are made ready together."""

I16_NR = 4
"""Such tokens that are multiplied with some rows at a time, at the most."""

MAX_I16_INT8_TOKENS = 8
"""Such tokens up to which they are multiplied with rows of 8-bit weights, of a scale per row, as these lie. More of
them are multiplied with panels."""

MAX_I16_BLOCK_TOKENS_AVX2 = 3
"""The same with weights in blocks, where vectors are those of AVX2.

On an AMD EPYC (Zen 3, one thread), 4096 x 1024, in GFLOP/s, as they lie and in panels: with 4 tokens int8 70 and 51,
Q4_0 43 and 49, Q6_K 32 and 37; with 8 tokens 68 and 66, 43 and 62, 30 and 45; with 12 tokens 69 and 74, 42 and 72, 32
and 56, where bfloat16 has 49."""

MAX_I16_BLOCK_TOKENS_AVX512 = 8
"""The same with weights in blocks and vectors of 512 bits, where tokens else become float32.

On an AMD EPYC (Zen 4, one thread, without its products of bfloat16), cycles for 32 weights, in float32 and in integers:
Q4_K 11.7 and 4.4 with one token, 37 and 23 with 8; Q5_0 13 and 6, 30 and 27, but 36 and 40 with 12."""

PANEL_BYTES = 32 * 1024
"""Of weights that are transposed for products of many tokens with vectors of 512 bits: two thirds of an L1 cache; from
16 to 128 KiB make no difference."""

MIN_PANEL_TOKENS = 72
"""Tokens of bfloat16 from which on weights are transposed so, where the processor multiplies that in vectors; 8-bit
weights with a scale per group earlier."""

MIN_DEQUANT_TOKENS = 6
"""Tokens of bfloat16 from which on, up to there, rows of 8-bit weights and of blocks are made bfloat16 once for all.

On an AMD EPYC (Zen 4, one thread, weights from memory), ns for 32 weights, block of tokens by block as before and so:
int8 2.0 and 2.3 with 3 tokens, 2.9 and 2.6 with 6, 6.2 and 5.9 with 16, 12.6 and 10.7 with 32; Q4_K 2.4 and 2.4, 3.1
and 3.0, 7.9 and 6.1, 14 and 11.2; Q8_0 2.9 and 2.9, 3.8 and 3.3, 7.9 and 6.4, 15 and 11.8."""

DEQUANT_SPAN = 1024
"""Inputs of four rows of weights that are made bfloat16 at a time, while the four before are multiplied, where the
processor multiplies bfloat16 in vectors: 8 KiB. Both stay in an L1 cache, with the tokens that pass by.

On an AMD EPYC (Zen 4, one thread), 8-bit weights from memory, ns for 32 of them with 8 tokens: whole rows of 1024
inputs take 3.1, of 1536 4.5, of 4096 5.4; in spans these take 3.4."""

EPILOGUE_ROWS = 16
"""Rows of weights whose sums are kept for all tokens before they are put out."""

MIN_AMX_TOKENS = 6
"""Tokens from which on bfloat16 products run on matrix units, where the processor has them.

Up to 16 tokens take as long as one there. On an Intel Xeon (two threads of one core; `tools/compare_products.py`),
4096 x 4096, in GFLOP/s on vectors and on tiles: 144 and 110 with 3 tokens, 182 and 184 with 5, 195 and 221 with 6,
165 and 307 with 8. With 8-bit weights in groups of 128 they are even at 4."""

MIN_AMX_EXPERT_TOKENS = 16
"""The same for each expert of a layer, on average: an expert's tokens fill tiles of their own, and so many at the least
bound the tiles that stay half empty."""

AMX_PANEL_K = 128
"""Inputs of 32 rows of weights that are copied for matrix units at a time: 8 KiB. It stays in an L1
cache, which two threads may share, with the tokens that pass by."""

TILE_GROUP_BYTES = 1024 * 1024
"""Bytes of the tokens that matrix units take together: half of such a processor's L2 cache."""

ATTENTION_TILE = 128
"""Keys that attention takes at a time."""

MIN_AMX_QUERIES = 5
"""Queries of a row, for each key head (its tokens times the heads of a group), from which on bfloat16 attention runs on
matrix units, where the processor has them.

On two cores of a Xeon with AMX, 24 calls for 8 rows of 128 tokens, 8 key heads of 128: with 2 queries vectors take 3.6
ms and matrix units 5.0, with 4 both take 5.2, with 6 they take 6.9 and 5.2, with 8 8.9 and 5.6."""

ATTENTION_UNIT_ROWS = 256
"""Query rows that attention takes at a time, a vision encoder's too: as many as make packing a tile cheap beside its
use."""

MAX_SPLIT_ROWS = 32
"""Query rows of a unit of attention whose keys several threads may share, at the most: each thread keeps their sums for
each tile, and that must stay small."""

SCAN_HEADS = 4
"""Heads that a thread scans at a time."""

SCAN_CHUNK = 16
"""Tokens that the native scan takes as one chunk, at the most. It keeps the states of some heads in a core's cache, so
that a pass over one costs little."""

TILED_SCAN_CHUNK = 32
"""The same on matrix units, where states are in float32: the inputs of a tile."""

DELTA_CHUNK = 64
"""Tokens that the reference of a delta net's scan takes as one chunk, at the most."""

DELTA_CHANNEL_CHUNK = 16
"""The same with a decay per key channel, for which it makes one number for each pair of tokens and channel."""

DELTA_COLUMNS = 32
"""Value channels of a delta net's head that the native kernels take at a time: with 128 key channels their state takes
16 KiB, which stay in an L1 cache."""

DELTA_SPAN = 32
"""Tokens whose keys and queries the native scan prepares at a time, for all columns of a head."""

SAMPLE_BLOCK = 256
"""Logits with a maximum of their own."""

ATTENTION_SLAB = 256
"""Tokens of a prompt chunk that the reference has attend at a time, so that a causal mask has no more rows."""

DEQUANT_SLAB = 2**22
"""Elements of 8-bit weights that a reference expands at a time."""

INT4_STEPS = 8
"""Scales that are tried for a group of 4-bit weights: the first spans its range, and each of the others so many percent
less of it than the one before (`INT4_SHRINK`). Twice as many, or zero points beside the nearest, take off another 1 %
of the squared error of normally distributed weights, where these take off 8 %."""

INT4_SHRINK = 5


def chunk_length(chunk_size: int, longest: int) -> int:
    """Tokens per chunk of a scan: the largest divisor of the model's `chunk_size` up to `longest`."""
    return next(n for n in range(min(chunk_size, longest), 0, -1) if chunk_size % n == 0)
