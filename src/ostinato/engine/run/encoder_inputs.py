"""Images as the vision encoder reads them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
import torch

from ostinato.layers.step import EncoderInputs
from ostinato.media.item import MediaItem
from ostinato.plan.model import VisionSpec


def encoder_inputs(items: Sequence[MediaItem], vision: VisionSpec) -> EncoderInputs:
    """`items`, at least one, side by side, on the host, without padding."""
    positions = [patch_positions(item.grid, vision.merge_size) for item in items]
    taps = [
        position_taps(of_item, item.grid, isqrt(vision.num_positions))
        for of_item, item in zip(positions, items, strict=True)
    ]
    starts = np.cumsum([0, *(len(item.patches) for item in items)], dtype=np.int32)
    return EncoderInputs(
        patches=torch.from_numpy(np.concatenate([item.patches for item in items])),
        taps=torch.from_numpy(np.concatenate([ids for ids, _ in taps])),
        tap_weights=torch.from_numpy(np.concatenate([weights for _, weights in taps])),
        positions=torch.from_numpy(np.concatenate(positions)),
        starts=torch.from_numpy(starts),
    )


def patch_positions(grid: tuple[int, int], merge: int) -> np.ndarray:
    """[patches, 2] int64: row and column of the patches of a grid in the order of merging: those of one token, which
    make a square of `merge` by `merge`, row by row, the squares row by row too."""
    height, width = grid
    rows, columns = np.indices((height, width), dtype=np.int64)
    squares = (height // merge, merge, width // merge, merge)
    return np.stack([axis.reshape(squares).swapaxes(1, 2).ravel() for axis in (rows, columns)], axis=1)


def position_taps(positions: np.ndarray, grid: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """The learned embeddings, of `side` by `side` places, that surround each patch when the grid is stretched over all
    of them, corner on corner: their numbers [patches, 4] int64 and bilinear weights [patches, 4] float32."""
    lasts = np.array([max(size - 1, 1) for size in grid], dtype=np.float32)
    places = positions.astype(np.float32) * np.float32(side - 1) / lasts
    low = np.floor(places).astype(np.int64)
    part = places - low.astype(np.float32)
    (row, column), (row_part, column_part) = low.T, part.T
    below, right = np.minimum(row + 1, side - 1), np.minimum(column + 1, side - 1)
    numbers = (row * side + column, row * side + right, below * side + column, below * side + right)
    weights = (
        (1 - row_part) * (1 - column_part),
        (1 - row_part) * column_part,
        row_part * (1 - column_part),
        row_part * column_part,
    )
    return np.stack(numbers, axis=1), np.stack(weights, axis=1)
