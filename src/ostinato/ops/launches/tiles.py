"""Tiles over ragged rows (`ops/triton/tiles.py`)."""

from __future__ import annotations

SPAN = 128
"""Rows whose starts a program reads at a time to find its own."""


def num_tiles(tokens: int, rows: int, tile: int) -> int:
    """Tiles of `tile` tokens: of `rows` rows with at most `tokens` tokens together, and of the tokens behind them."""
    return tokens // tile + rows + 1
