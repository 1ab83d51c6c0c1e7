"""An image in the encoder's form, and the positions of tokens in a prompt with images (M-RoPE).

Patches are kept as the pixels that they are made of until the encoder needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.media.processor_config import PixelSettings


@dataclass(frozen=True, eq=False)
class Patches:
    """Patches that `np.asarray` computes anew each time, in the order of merging.

    The array is [patches, channels * temporal_patch_size * patch_size ** 2] float32; with `is_naflex`, channels last.
    A request may wait long with its images, and may be sent to another process: pixels take a fourth of their patches'
    bytes, and an image's an eighth, since its patches repeat it in each frame of a temporal patch.
    """

    frames: np.ndarray
    """Pixels [1 or temporal_patch_size, height, width, channels], both sides whole tokens.

    They are uint8, or float32 with `settings.in_floats`.
    """
    settings: PixelSettings

    def __len__(self) -> int:
        _, height, width, _ = self.frames.shape
        return height * width // self.settings.patch_size**2

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("patches are made when they are asked for")
        made = _patches(self.frames, self.settings)
        return made if dtype is None else made.astype(dtype, copy=False)


def _patches(frames: np.ndarray, settings: PixelSettings) -> np.ndarray:
    count, height, width, channels = frames.shape
    patch, merge = settings.patch_size, settings.merge_size
    rows, columns = height // patch // merge, width // patch // merge
    tiles = frames.reshape(count, rows, merge, patch, columns, merge, patch, channels)
    tiles = tiles.transpose(7, 1, 4, 2, 5, 0, 3, 6).reshape(channels, -1, count, patch * patch)
    patches = np.empty((tiles.shape[1], channels, settings.temporal_patch_size, patch * patch), dtype=np.float32)
    if settings.in_floats:
        mean, std = _of_unscaled(settings)
        np.divide(tiles - mean[:, None, None, None], std[:, None, None, None], out=patches.swapaxes(0, 1))
        return patches.reshape(len(patches), -1)
    for channel, values in enumerate(_normalised(settings)):
        patches[:, channel] = values[tiles[channel]]
    if settings.is_naflex:
        patches = np.moveaxis(patches, 1, -1)
    if settings.has_windows:
        patches = by_windows(patches)
    return patches.reshape(len(patches), -1)


def by_windows(patches: np.ndarray) -> np.ndarray:
    """Return patches of tokens of four by four, which are row by row, with those of two by two next to each other."""
    tokens = patches.reshape(-1, 2, 2, 2, 2, *patches.shape[1:])  # window row, row in it, window column, column in it
    return np.ascontiguousarray(tokens.swapaxes(2, 3)).reshape(patches.shape)


def _normalised(settings: PixelSettings) -> np.ndarray:
    """Return the normalised value of each pixel value, [channels, 256] float32, rounded where transformers rounds."""
    values = np.arange(256)
    mean, std = np.array(settings.mean, dtype=np.float32), np.array(settings.std, dtype=np.float32)
    if settings.max_side and settings.divides:
        scaled = values.astype(np.float32) / np.float32(1.0 / settings.scale)
    elif settings.max_side:
        scaled = values.astype(np.float32) * np.float32(settings.scale)
    elif settings.kind == "video" or settings.is_naflex or settings.side or settings.slices:
        mean, std = _of_unscaled(settings)
        scaled = values.astype(np.float32)
    else:
        scaled = (values * settings.scale).astype(np.float32)
    return (scaled[None] - mean[:, None]) / std[:, None]


def _of_unscaled(settings: PixelSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of unscaled pixels, which transformers' processors with torch normalise."""
    unscale = np.float32(1.0 / settings.scale)
    return np.array(settings.mean, dtype=np.float32) * unscale, np.array(settings.std, dtype=np.float32) * unscale


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
