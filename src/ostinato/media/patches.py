"""Patches, kept as the pixels that they are made of until the encoder needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.media.settings import PixelSettings


@dataclass(frozen=True, eq=False)
class Patches:
    """Patches that `np.asarray` computes anew each time, in the order of merging.

    The array is [patches, channels * temporal_patch_size * patch_size ** 2] float32. A request may wait long with its
    images, and may be sent to another process: pixels take a fourth of their patches' bytes, and an image's an eighth,
    since its patches repeat it in each frame of a temporal patch.
    """

    frames: np.ndarray
    """Pixels [1 or temporal_patch_size, height, width, channels] uint8, both sides whole tokens."""
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
    for channel, values in enumerate(_normalised(settings)):
        patches[:, channel] = values[tiles[channel]]
    return patches.reshape(len(patches), -1)


def _normalised(settings: PixelSettings) -> np.ndarray:
    """Return the normalised value of each pixel value, [channels, 256] float32, rounded where transformers rounds.

    Its video processor normalises unscaled pixels, with mean and deviation scaled instead.
    """
    values = np.arange(256)
    mean, std = np.array(settings.mean, dtype=np.float32), np.array(settings.std, dtype=np.float32)
    if settings.kind == "video":
        unscale = np.float32(1.0 / settings.scale)
        mean, std = mean * unscale, std * unscale
        scaled = values.astype(np.float32)
    else:
        scaled = (values * settings.scale).astype(np.float32)
    return (scaled[None] - mean[:, None]) / std[:, None]
