"""The sizes of the kernels' tiles, slabs and blocks, from which their scratch memory follows.

Plain numbers and nothing else. The plan reads them without torch, and the build gives C++ each of them as a constant of
the same name (`cmake/write_sizes.py`).
"""

from __future__ import annotations

VECTOR = 16
"""Floats of the widest vector. Scratch is padded to whole vectors of it."""

GROUP_BYTES = 512 * 1024
"""Bytes of the tokens that a matrix product takes together while rows of weights pass by: they stay in an L2 cache."""

LEAST_GROUP_TOKENS = 24
"""Tokens that it takes together at least, however large they are."""

GROUP_TOKENS = 512
"""Tokens whose sums a product of many tokens keeps at a time: 128 KiB, which stay in an L2 cache."""

PANEL_ROWS = 16
"""Rows of weights whose sums are kept for all tokens before they are put out."""

LEAST_TILE_TOKENS = 16
"""Tokens from which on bfloat16 products run on matrix units, where the processor has them.

No kernel of Ostinato has been measured on such a processor yet. The figure follows from a trial of one product, 4096 x
4096 on two cores of a Xeon: 32 tokens took 2.1 ms (507 GFLOP/s), and fewer can take no longer, since tiles hold 16 or
32 of them; vectors reach 140 GFLOP/s there, so they are slower from about 16 tokens on."""

TILE_SPAN = 512
"""Inputs of 32 rows of weights that are copied for matrix units at a time: 32 KiB, which stay in an L1 cache."""

TILE_GROUP_BYTES = 1024 * 1024
"""Bytes of the tokens that matrix units take together: half of such a processor's L2 cache. Not measured either."""

ATTENTION_TILE = 128
"""Keys that attention takes at a time."""

UNIT_ROWS = 256
"""Query rows that attention takes at a time, a vision encoder's too: as many as make packing a tile cheap beside its
use."""

CUT_ROWS = 32
"""Query rows of a unit of attention whose keys several threads may share, at the most: each thread keeps their sums for
each tile, and that must stay small."""

SCAN_HEADS = 4
"""Heads that a thread scans at a time."""

SCAN_CHUNK = 16
"""Tokens that the native scan takes as one chunk, at the most. It keeps the states of some heads in a core's cache, so
that a pass over one costs little."""

TILED_SCAN_CHUNK = 32
"""The same on matrix units, where states are in float32: the inputs of a tile."""

SAMPLE_BLOCK = 256
"""Logits with a maximum of their own."""

ATTENTION_SLAB = 256
"""Tokens of a prompt chunk that the reference has attend at a time, so that a causal mask has no more rows."""

EXPANDED_ELEMENTS = 2**22
"""Elements of 8-bit weights that a reference expands at a time."""
