"""inject_media: encoder outputs for the tokens of images, placed among the hidden states of text."""

from __future__ import annotations

import torch


def inject_media(x: torch.Tensor, media_cells: torch.Tensor, media: torch.Tensor, row: int, add: bool) -> torch.Tensor:
    """Replace each token's hidden state by row `row` of its cell, in place, or with `add` add that row to it.

    Tokens with cell 0 keep their hidden state. `x` [tokens, hidden]; `media_cells` [tokens] int64; `media` [cells,
    rows, hidden] in the dtype of `x`. -> `x`.

    Cell 0 may contain anything, including NaN.
    """
    rows = media.select(1, row).index_select(0, media_cells)
    return x.copy_(torch.where(media_cells.unsqueeze(1) > 0, x + rows if add else rows, x))
