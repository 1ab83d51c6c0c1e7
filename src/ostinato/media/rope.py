"""Where the tokens of a prompt with images stand for the rotary embedding (M-RoPE), as transformers'
`Qwen3VLModel.get_rope_index` has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.media.item import MediaItem, RopePositions


def rope_positions(num_tokens: int, spans: Sequence[tuple[int, int, MediaItem]], merge_size: int) -> RopePositions:
    """Positions of a prompt whose tokens `start` to `end - 1` stand for `item`, for each (start, end, item).

    A token of text is one step after what stands before it, in time, height and width alike. The tokens of an item
    share a time, and stand at their row and column; what follows it comes after its longer side. An item of which only
    some tokens are kept takes the room of the whole, and its tokens stand where they stood.
    """
    pieces: list[np.ndarray] = []
    position = begin = 0
    for start, end, item in spans:
        pieces.append(_text(position, start - begin))
        position += start - begin
        rows, columns = (side // merge_size for side in item.grid)
        pieces.append(_item(position, rows, columns, item.kept))
        position += max(rows, columns)
        begin = end
    pieces.append(_text(position, num_tokens - begin))
    position += num_tokens - begin
    return RopePositions(np.concatenate(pieces), position - num_tokens)


def _text(position: int, count: int) -> np.ndarray:
    steps = np.arange(position, position + count, dtype=np.int64)
    return np.repeat(steps[:, None], 3, axis=1)


def _item(position: int, rows: int, columns: int, kept: np.ndarray | None) -> np.ndarray:
    tokens = np.arange(rows * columns, dtype=np.int64) if kept is None else kept
    places = np.stack((np.zeros_like(tokens), tokens // columns, tokens % columns), axis=1)
    return places + position
