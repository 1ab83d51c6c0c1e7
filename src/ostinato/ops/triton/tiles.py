"""Tiles over ragged rows: a program finds its row on the device, on a grid that follows from sizes known to the host.

Row r owns the tokens `starts[r]:starts[r + 1]`, and the tokens after the last row are one more row. Its tiles of `TILE`
tokens have the numbers from `starts[r] // TILE + r` on. There are enough numbers before the next row's: a number of
tokens, rounded up to tiles, is at most one more than the difference of the quotients. Surplus tiles are empty.
`launches/tiles.py` counts them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owner_of(index, starts, count, base, TILE: tl.constexpr, EXTRA: tl.constexpr, SPAN: tl.constexpr):
    """Return the last of `count` rows whose first tile's number is at most `index`.

    That number is `(start - base) // TILE`, plus `EXTRA` for each row before it.
    """
    row = -1
    for first in range(0, count, SPAN):
        each = first + tl.arange(0, SPAN)
        start = tl.load(starts + each, mask=each < count, other=0)
        row += tl.sum(((each < count) & ((start - base) // TILE + EXTRA * each <= index)).to(tl.int32))
    return row


@triton.jit
def find_tile(starts, rows, tokens, index, TILE: tl.constexpr, SPAN: tl.constexpr):
    """Return (row, first token, end) of tile `index`, which has up to `TILE` tokens and may have none.

    `row` is `rows` for the tokens after the last one.
    """
    row = owner_of(index, starts, rows + 1, 0, TILE, 1, SPAN)
    start = tl.load(starts + row)
    end = tl.where(row < rows, tl.load(starts + tl.minimum(row + 1, rows)), tokens)
    first = start + (index - start // TILE - row) * TILE
    return row, first, tl.minimum(end, first + TILE)
