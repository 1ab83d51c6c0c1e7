"""An image in the encoder's form, and the positions of tokens in a prompt with images (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.media.patches import Patches


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, or one temporal patch of a video, ready for the encoder.

    `num_tokens` tokens of the prompt stand for it: one for each `merge_size ** 2` patches, or only those in `kept` if
    tokens were pruned.
    """

    patches: np.ndarray | Patches
    """Patches [patches, patch_elements] float32 in merge order, or an object that `np.asarray` turns into them."""
    grid: tuple[int, int]
    """Height and width, in patches."""
    num_tokens: int
    digest: str
    """Cryptographic digest of pixels, grid, processing and `kept`."""
    kept: np.ndarray | None = None
    """Output tokens that are kept, ascending, [num_tokens] int64; None: all of them."""


@dataclass(frozen=True, eq=False)
class RopePositions:
    """Positions of a request's tokens in time, height and width (M-RoPE).

    Those of the prompt are listed; all later tokens are at their index plus `delta`, in all three.
    """

    prompt: np.ndarray
    """Positions of the prompt's tokens, [prompt tokens, 3] int64."""
    delta: int

    def of(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens `start` to `end - 1`, [end - start, 3] int64."""
        known = self.prompt[start:end]
        following = np.arange(start + len(known), end, dtype=np.int64) + self.delta
        return np.concatenate((known, np.repeat(following[:, None], 3, axis=1)))


def rope_positions(num_tokens: int, spans: Sequence[tuple[int, int, MediaItem]], merge_size: int) -> RopePositions:
    """Compute the positions of a prompt whose tokens `start` to `end - 1` stand for `item`, for each span.

    A span is (start, end, item). A token of text is one step after its predecessor, in time, height and width alike.
    The tokens of an item share a time, and are at their row and column; the next token comes after the item's longer
    side. A pruned item takes the room of the whole item, and its tokens stay at their places.
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
