"""inject_media: what an encoder gave for the tokens of images takes its place among the hidden states of text."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, media_cells: torch.Tensor, media: torch.Tensor, row: int, add: bool) -> torch.Tensor:
    """Row `row` of each token's cell replaces its hidden state in place, or with `add` is added to it; tokens with cell
    0 keep theirs.

    `x` [tokens, hidden]; `media_cells` [tokens] int64; `media` [cells, rows, hidden] in the dtype of `x`. -> `x`.

    Cell 0 may hold anything, NaN too.
    """
    rows = media.select(1, row).index_select(0, media_cells)
    return x.copy_(torch.where(media_cells.unsqueeze(1) > 0, x + rows if add else rows, x))
