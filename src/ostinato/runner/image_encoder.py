"""Images of a step: written as encoder inputs, encoded before the forward pass, and kept in the encoder cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from ostinato.graphs.buffers import EncoderBuffers
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.media.media_item import MediaItem, by_windows
from ostinato.media.resize import BILINEAR, antialiased_weights
from ostinato.ops.step_inputs import EncoderInputs
from ostinato.plan.layer_specs import VisionSpec
from ostinato.scheduler.batch import MediaToEncode

if TYPE_CHECKING:
    from ostinato.ops.step_inputs import Array


class ImageEncoder:
    """Encodes images into the encoder cache, as graphs or eagerly."""

    def __init__(self, graphs: EncoderGraphs, cells: Array | None, most_rows: int, prefix_rows: int = 0) -> None:
        """Keep the cache `cells` [cells, rows, hidden].

        Groups of images with at most `most_rows` patches, and `prefix_rows` more for each image, are encoded at a time,
        for which activations were planned.
        """
        assert cells is not None, "a model that takes images has an encoder cache"
        self.graphs = graphs
        self.cells = cells
        self._most_rows, self._prefix_rows = most_rows, prefix_rows

    def run(self, images: Sequence[MediaToEncode]) -> None:
        """Encode each image and write the result to its cells. Of a pruned image, only the kept tokens are written."""
        for group in _groups(images, self._most_rows, self._prefix_rows):
            for image, encoded in zip(group, self.graphs.run([each.item for each in group]), strict=True):
                kept = image.item.kept
                if kept is not None:
                    encoded = encoded[kept.tolist()]
                self.cells[list(image.cells)] = encoded


def _groups(images: Sequence[MediaToEncode], most_rows: int, prefix_rows: int) -> Iterator[Sequence[MediaToEncode]]:
    """Yield groups of neighbouring images with at most `most_rows` patches and rows of prefixes in all."""
    group: list[MediaToEncode] = []
    rows = 0
    for image in images:
        count = len(image.item.patches) + prefix_rows
        if group and rows + count > most_rows:
            yield group
            group, rows = [], 0
        group.append(image)
        rows += count
    if group:
        yield group


def write_encoder_inputs(buffers: EncoderBuffers, items: Sequence[MediaItem], vision: VisionSpec) -> EncoderInputs:
    """Write `items`, at least one, one after the other into `buffers`, and return the views of their patches.

    They are ready when `buffers.pad` has padded them.
    """
    arrays, side, size = buffers.arrays, isqrt(vision.num_positions), vision.conv_size
    begin, starts, prefix_rows = 0, [0], vision.prefix_tokens * vision.patches_per_token
    for item in items:
        if prefix_rows:
            starts.append(begin + prefix_rows - vision.num_prefix)
            _write_prefix(buffers, begin, starts[-1], begin + prefix_rows, vision.num_positions)
            begin += prefix_rows
        end = begin + len(item.patches)
        starts.append(end)
        positions = patch_positions(item.grid, vision.merge_size, vision.has_windows)
        arrays["patches"][begin:end] = item.patches
        arrays["positions"][begin:end] = positions
        if size:
            taps, weights = neighbour_taps(positions, item.grid, vision.merge_size, size)
            taps += begin * size
        elif vision.positions_by_axis:
            taps, weights = axis_taps(positions, vision.num_positions // 2)
        elif vision.has_nearest_positions:
            taps, weights = nearest_taps(positions, item.grid, side)
        elif vision.crops_positions:
            taps, weights = square_taps(positions, max(item.grid), side)
        elif vision.is_naflex:
            taps, weights = antialiased_taps(positions, item.grid, side)
        else:
            taps, weights = interpolation_taps(positions, item.grid, side)
        arrays["taps"][begin:end], arrays["tap_weights"][begin:end] = taps, weights
        begin = end
    arrays["starts"][: len(starts)] = starts
    return buffers.view(starts[-1])


def _write_prefix(buffers: EncoderBuffers, begin: int, first: int, end: int, num_positions: int) -> None:
    """Write padding into the rows `begin` to `first - 1`, and a prefix from `first` on.

    Its vectors follow the position embeddings in their table.
    """
    for name in ("patches", "positions", "taps", "tap_weights"):
        buffers.arrays[name][begin:end] = 0
    buffers.arrays["taps"][first:end, 0] = np.arange(num_positions, num_positions + end - first)
    buffers.arrays["tap_weights"][first:end, 0] = 1


def patch_positions(grid: tuple[int, int], merge: int, has_windows: bool = False) -> np.ndarray:
    """Return row and column of a grid's patches in merge order, [patches, 2] int64.

    The patches of one token, a square of `merge` by `merge`, follow each other row by row, or window by window; the
    squares come row by row too.
    """
    height, width = grid
    rows, columns = np.indices((height, width), dtype=np.int64)
    squares = (height // merge, merge, width // merge, merge)
    positions = np.stack([axis.reshape(squares).swapaxes(1, 2).ravel() for axis in (rows, columns)], axis=1)
    return by_windows(positions) if has_windows else positions


def nearest_taps(positions: np.ndarray, grid: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the taps [patches, 4] int64 of one learned embedding per patch, and their weights, float32.

    The part of the image before a patch's first row and column decides. transformers computes it in float32, which may
    choose the embedding before if it lies between two, as for 27 patches and 27 embeddings along a side.
    """
    rows, columns = (positions * side // np.array(grid)).T
    taps, weights = np.zeros((len(positions), 4), dtype=np.int64), np.zeros((len(positions), 4), dtype=np.float32)
    taps[:, 0], weights[:, 0] = rows * side + columns, 1
    return taps, weights


def axis_taps(positions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers [patches, 2] int64 and weights, float32, of the embeddings of a patch's column and row.

    Those of columns are the first `count`, and those of rows follow.
    """
    # An image is never so long, but the black one that fills a graph when it is captured may be.
    inside = np.minimum(positions, count - 1)
    return inside[:, ::-1] + np.array([0, count]), np.ones(positions.shape, dtype=np.float32)


def interpolation_taps(positions: np.ndarray, grid: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers [patches, 4] int64 and bilinear weights [patches, 4] float32 of each patch's embeddings.

    They are the four learned embeddings, of `side` by `side`, that surround the patch when the grid is stretched over
    all of them, corner on corner.
    """
    lasts = np.array([max(size - 1, 1) for size in grid], dtype=np.float32)
    return _bilinear_taps(positions.astype(np.float32) * np.float32(side - 1) / lasts, side)


def square_taps(positions: np.ndarray, longest: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and weights of `interpolation_taps` if the learned embeddings are resized to a square.

    Its sides are the `longest` of the image's grid, which is in its first corner. Middles of patches are at middles of
    embeddings, and nothing is averaged if there are fewer patches.
    """
    places = (positions.astype(np.float32) + np.float32(0.5)) * np.float32(side / longest) - np.float32(0.5)
    return _bilinear_taps(np.maximum(places, 0), side)


def _bilinear_taps(places: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four embeddings around each row and column, [patches, 2] float32, and their weights."""
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


def antialiased_taps(positions: np.ndarray, grid: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers [patches, side ** 2] int64 and weights, float32, of each patch's learned embeddings.

    The square of `side` by `side` embeddings is resized to the grid as an image is, bilinearly and with antialiasing. A
    patch may see all of them, so all are listed; those that it does not see have weight 0.
    """
    of_axes = []
    for place, size in zip(positions.T, grid, strict=True):
        starts, weights = antialiased_weights(side, size, BILINEAR)
        dense = np.zeros((size, side + weights.shape[1]))  # Taps of weight 0 may be behind the last.
        np.put_along_axis(dense, starts[:, None] + np.arange(weights.shape[1]), weights, axis=1)
        of_axes.append(dense[place, :side])
    both = of_axes[0][:, :, None] * of_axes[1][:, None, :]
    numbers = np.broadcast_to(np.arange(side**2, dtype=np.int64), (len(positions), side**2))
    return numbers, both.reshape(len(positions), -1).astype(np.float32)


def neighbour_taps(
    positions: np.ndarray, grid: tuple[int, int], merge: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the taps [patches, size ** 2] int64 of a convolution over a grid, and their weights, float32.

    The tap of the neighbour `row` and `column` in the square of `size` by `size` around a patch is the neighbour's
    number times `size`, plus `column`: the place of the neighbour's product with that column's weight, if the products
    of a patch with a row of weights follow each other. Neighbours outside the grid have weight 0, and the number of the
    patch itself.
    """
    height, width = grid
    offsets = np.indices((size, size), dtype=np.int64).reshape(2, -1) - size // 2
    rows, columns = (axis[:, None] + offset for axis, offset in zip(positions.T, offsets, strict=True))
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    squares = rows // merge * (width // merge) + columns // merge
    numbers = squares * merge**2 + rows % merge * merge + columns % merge
    own = np.arange(len(positions), dtype=np.int64)[:, None]
    return np.where(inside, numbers, own) * size + offsets[1] + size // 2, inside.astype(np.float32)
