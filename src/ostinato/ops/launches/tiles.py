"""Tiles over ragged rows (`ops/triton/tiles.py`)."""

from __future__ import annotations

SPAN = 128
"""Rows whose starts a program reads at a time to find its row."""


def num_tiles(tokens: int, rows: int, tile: int) -> int:
    """Return the number of tiles of `tile` tokens that cover `rows` rows and the tokens after them.

    `tokens` is the most that the rows have together.
    """
    return tokens // tile + rows + 1
