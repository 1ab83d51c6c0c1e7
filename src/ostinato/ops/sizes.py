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

MAX_PACKED_ALONE = 16 * 1024
"""Largest number of elements of tokens that each thread packs for itself: sooner than it would wait for others."""

MIN_GROUP_TOKENS = 24
"""Smallest number of tokens that a matmul takes together, however large they are."""

MAX_GROUP_TOKENS = 512
"""Tokens whose sums a large-m matmul keeps at a time: 128 KiB, which stay in an L2 cache."""

AVX2_PANEL_K = 128
"""Inputs of 16 rows of weights in a panel with AVX2 alone: 8 KiB, which stay in an L1 cache beside the tokens."""

AVX2_LANES = 8
"""Floats of an AVX2 vector."""

AVX2_PANEL_VECTORS = 2
"""Vectors of outputs in an AVX2 panel."""

I16_SCALE_SPAN = 64
"""Largest number of inputs of an i16 token that share one scale, with AVX2 vectors."""

I16_SCALE_SPAN_AVX512 = 128
"""The same with AVX-512, for int8 rows that have one scale."""

I16_TOKEN_PADDING = 256
"""Inputs that an i16 token, and a panel that it is multiplied with, are padded to.

They cover all of a block, or several blocks whose scales are prepared together.
"""

I16_NR = 4
"""Largest number of i16 tokens that are multiplied with some rows at a time."""

I16_BLOCK_NR_AVX2 = 3
"""Largest number of i16 tokens that are multiplied with some rows in blocks at a time, with AVX2 vectors."""

PANEL_BYTES = 32 * 1024
"""Bytes of weights that are transposed for large-m matmuls with vectors of 512 bits: two thirds of an L1 cache.

Sizes from 16 to 128 KiB make no difference.
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

INT8_MAX_K = 2**17
"""Most inputs of a product in 8-bit integers: its sum fits into 32 bits."""

INT8_LEAST_EXPONENT = -100
"""A token that is quantised to int8 counts as zeros if no magnitude is above two to this power."""

INT8_PANEL_K = 512
"""Inputs of 32 rows of int8 weights that are copied for matrix units at a time: 16 KiB, a third of an L1 cache."""

AMX_PANEL_K = 128
"""Inputs of 32 rows of weights that are copied for matrix units at a time: 8 KiB.

They stay in an L1 cache, which two threads may share, with the tokens that pass by.
"""

TILE_GROUP_BYTES = 1024 * 1024
"""Bytes of the tokens that matrix units take together: half of such a processor's L2 cache."""

ATTENTION_TILE = 128
"""Keys that attention takes at a time."""

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

INT8_STATE_BLOCK = 32
"""Neighbours in a state's last dimension that share a scale where the state is rounded to 8 bits.

As many as a delta net's columns that a thread takes at a time, so that no scale depends on two threads.
"""

INT8_STATE_TOKENS = 16
"""Tokens after which such states are rounded: after those at positions 15, 31 and so on, of prompts and outputs alike.
"""

SAMPLE_BLOCK = 256
"""Logits in a block with one maximum."""

ATTENTION_SLAB = 256
"""Tokens of a prompt chunk that attend at a time in the reference, which bounds the rows of a causal mask."""

TOKEN_DIGITS = 3
"""Digits of a token id in a slot, in base 256: every dtype of a model has such numbers exactly."""

INDEX_SLAB = 32
"""Tokens of a prompt chunk that select blocks at a time in the reference, which bounds their scores of all blocks."""

INDEX_GROUP_TOKENS = 256
"""Largest number of tokens that select blocks at a time in the native kernel: a block's key is made once for them."""

INDEX_HEADS_AT_ONCE = 4
"""Heads of an indexer that are scored at a time: independent sums hide the latency of additions."""

INDEX_KEY_VECTORS = 6
"""Intermediate vectors from which the native kernel makes the key of a block."""

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
