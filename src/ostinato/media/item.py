"""An image as the encoder gets it, and where the tokens of a prompt with images stand (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.media.patches import Patches


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, or one temporal patch of a video, ready for the encoder.

    `num_tokens` tokens of the prompt stand for it: one for each `merge_size ** 2` patches, of which those in `kept`
    alone if tokens were pruned.
    """

    patches: np.ndarray | Patches
    """[patches, patch_elements] float32, in the order of merging, or what `np.asarray` makes that of"""
    grid: tuple[int, int]
    """Height and width, in patches"""
    num_tokens: int
    digest: str
    """A cryptographic one of pixels, grid, processing and `kept`"""
    kept: np.ndarray | None = None
    """[num_tokens] int64: the output tokens that are kept, ascending; None: all of them"""


@dataclass(frozen=True, eq=False)
class RopePositions:
    """Where a request's tokens stand in time, height and width (M-RoPE): those of the prompt as listed, all that
    follow it at their position plus `delta`, in all three."""

    prompt: np.ndarray
    """[prompt tokens, 3] int64"""
    delta: int

    def of(self, start: int, end: int) -> np.ndarray:
        """[end - start, 3] int64: of the tokens at positions `start` to `end - 1`."""
        known = self.prompt[start:end]
        following = np.arange(start + len(known), end, dtype=np.int64) + self.delta
        return np.concatenate((known, np.repeat(following[:, None], 3, axis=1)))


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
