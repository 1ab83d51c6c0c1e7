"""Conversion of images and frames to patches, and the choice of the video tokens to prune.

Pixels are resized, normalised and cut as in transformers: images as in its processor with Pillow and NumPy, frames as
in its video processor, which uses torch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from ostinato.errors import RequestError
from ostinato.media.media_item import MediaItem, Patches
from ostinato.media.processor_config import PixelSettings
from ostinato.media.resize import (
    crop_grid,
    image_size,
    resize,
    resize_floats,
    slice_grid,
    slice_size,
    tile_grid,
    video_size,
)


def kept_tokens(pixels: np.ndarray, rate: float) -> list[np.ndarray]:
    """Choose the tokens that are kept of each temporal patch: ascending numbers from 0 to tokens - 1, int64.

    `pixels`: [temporal patches, tokens, elements] uint8, the pixels that each token stands for. Of all `n` tokens,
    `ceil(n * (1 - rate))` are kept, and at least those of the first temporal patch, which stays whole. Of the others,
    those are kept that differ most, by the sum of absolute differences, from the same place in the temporal patch
    before; of equals, the earlier. A temporal patch may keep none.
    """
    patches, tokens, _ = pixels.shape
    dropped = min(int(Decimal(str(rate)) * patches * tokens), (patches - 1) * tokens)
    differences = np.abs(pixels[1:].astype(np.int16) - pixels[:-1]).sum(axis=2, dtype=np.int64).reshape(-1)
    # Least different first; a stable sort of the reversed order puts the later of equals before the earlier.
    order = len(differences) - 1 - np.argsort(differences[::-1], kind="stable")
    keeps = np.ones(patches * tokens, dtype=bool)
    keeps[tokens + order[:dropped]] = False
    return [np.flatnonzero(row).astype(np.int64) for row in keeps.reshape(patches, tokens)]


@dataclass(frozen=True, eq=False)
class Video:
    """A video in the encoder's form: one item per temporal patch, with its time."""

    items: tuple[MediaItem, ...]
    timestamps: tuple[float, ...]
    """Seconds from the first frame: for each temporal patch, the mean of its first and last frame's times."""


@dataclass(frozen=True, eq=False)
class TiledImage:
    """A large image in the encoder's form: tiles row by row, and if it has a thumbnail, the whole image behind them.

    Or a long image, followed by its crops; or a large one, made small and followed by its slices.
    """

    items: tuple[MediaItem, ...]
    grid: tuple[int, int]
    """Rows and columns of tiles or crops."""
    has_crops: bool = False
    is_sliced: bool = False


def process_tiles(image: Image.Image, settings: PixelSettings) -> TiledImage:
    """Convert an image of mode RGB to one item, or to tiles if it is large. RequestError as for `process_image`."""
    whole, pixels = image_size(image.height, image.width, settings), np.asarray(image)
    grid = rows, columns = tile_grid(image.height, image.width, settings)
    tiles: list[np.ndarray] = []
    if settings.tiles is not None and rows * columns > 1:
        side = settings.tiles.size
        large = resize(pixels, rows * side, columns * side, settings.resample)
        cut = large.reshape(rows, side, columns, side, -1).swapaxes(1, 2)
        tiles += list(cut.reshape(-1, side, side, cut.shape[-1]))
    if not tiles or (settings.tiles is not None and settings.tiles.has_thumbnail):
        tiles.append(resize(pixels, *whole, settings.resample))
    return TiledImage(tuple(_item(tile[None], None, settings) for tile in tiles), grid)


def process_slices(image: Image.Image, settings: PixelSettings) -> TiledImage:
    """Convert an image of mode RGB to one item, and its slices if it is large. RequestError as for `process_image`."""
    whole, pixels = image_size(image.height, image.width, settings), np.asarray(image)
    grid = rows, columns = slice_grid(image.height, image.width, settings)
    pieces: list[np.ndarray] = []
    of_whole, slices = settings, settings.slices
    assert slices is not None, "the model has slices"
    if rows * columns > 1:
        height, width = slice_size(image.height, image.width, grid, settings)
        large = resize(pixels, rows * height, columns * width, settings.resample)
        cut = large.reshape(rows, height, columns, width, -1).swapaxes(1, 2)
        pieces += list(cut.reshape(-1, height, width, cut.shape[-1]))
        canvas = rows * height // settings.factor, columns * width // settings.factor
        of_whole = replace(settings, slices=replace(slices, canvas=canvas))
    small = _item(resize(pixels, *whole, settings.resample)[None], None, of_whole)
    return TiledImage((small, *(_item(piece[None], None, settings) for piece in pieces)), grid, is_sliced=True)


def process_crops(image: Image.Image, settings: PixelSettings) -> MediaItem | TiledImage:
    """Convert an image of mode RGB to one item, and its crops if it is long. RequestError as for `process_image`."""
    whole = process_image(image, settings)
    rows, columns = (0, 0) if settings.crops is None else crop_grid(image.height, image.width, settings.crops)
    if rows * columns == 0:
        return whole
    height, width = math.ceil(image.height / rows), math.ceil(image.width / columns)
    corners = itertools.product(range(0, image.height, height), range(0, image.width, width))
    boxes = [(x, y, min(x + width, image.width), min(y + height, image.height)) for y, x in corners]
    crops = tuple(process_image(image.crop(box), settings) for box in boxes)
    return TiledImage((whole, *crops), (rows, columns), has_crops=True)


def process_image(image: Image.Image, settings: PixelSettings) -> MediaItem:
    """Convert an image of mode RGB to patches. RequestError for proportions that no model sees."""
    height, width = image_size(image.height, image.width, settings)
    if settings.in_floats:
        pixels = resize_floats(np.asarray(image), height, width, settings.resample)
    elif settings.side or settings.max_side:
        sides = (settings.side,) * 2 if settings.side else (height, width)
        resized = resize(np.asarray(image), *sides, settings.resample)
        pixels = np.ascontiguousarray(resized[:height, :width])
    else:
        pixels = np.asarray(image.resize((width, height), resample=settings.resample))
    # An image is a video of one frame, which fills all places of a temporal patch.
    return _item(pixels[None], None, settings)


def process_video(
    frames: Iterable[Image.Image], count: int, fps: float, settings: PixelSettings, pruning_rate: float = 0.0
) -> Video:
    """Convert a video to patches, given `count` frames of mode RGB and of one size, `fps` of them per second.

    A last temporal patch that is not full repeats the last frame. `pruning_rate` of the tokens are left out where the
    picture does not change. RequestError for a video that does not conform.
    """
    if not _is_rate(fps, count):
        raise RequestError(f"fps {str(fps)[:100]!r} of a video should be a number above 0: its frames per second")
    if count > settings.max_frames:
        raise RequestError(
            f"a video of {count} frames is too long: at most {settings.max_frames} are taken; leave frames out, "
            "and give their fps accordingly"
        )
    video_size(count, settings.factor, settings.factor, settings)  # too few frames, before any is looked at
    resized = _resized(frames, count, settings)
    num = settings.temporal_patch_size
    resized += [resized[-1]] * (-count % num)
    groups = np.stack(resized).reshape(-1, num, *resized[0].shape)
    seconds = [min(i, count - 1) / fps for i in range(len(resized))]
    stamps = [(seconds[i] + seconds[i + num - 1]) / 2 for i in range(0, len(seconds), num)]
    kept: Sequence[np.ndarray | None] = [None] * len(groups)
    if pruning_rate > 0:
        kept = kept_tokens(np.stack([_tokens(group, settings) for group in groups]), pruning_rate)
    return Video(tuple(map(partial(_item, settings=settings), groups, kept)), tuple(stamps))


def _is_rate(fps: Any, count: int) -> bool:
    """Return whether `fps` frames per second give each of `count` frames a time."""
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    return is_number and 0 < fps < math.inf and math.isfinite(count / fps)


def _resized(frames: Iterable[Image.Image], count: int, settings: PixelSettings) -> list[np.ndarray]:
    """Resize the frames, [height, width, channels] uint8 each. RequestError if they are not of one size."""
    made: list[np.ndarray] = []
    first, size = (0, 0), (0, 0)
    for frame in frames:
        if not made:
            first = frame.size
            size = video_size(count, frame.height, frame.width, settings)
        if frame.size != first:
            raise RequestError(
                f"the frames of a video should have one size: the first is of {first[0]}x{first[1]} pixels, and one of "
                f"{frame.width}x{frame.height}"
            )
        made.append(resize(np.asarray(frame), *size, settings.resample))
    return made


def _item(frames: np.ndarray, kept: np.ndarray | None, settings: PixelSettings) -> MediaItem:
    """Make an item of `frames` [1 or temporal_patch_size, height, width, channels] uint8, both sides whole tokens."""
    grid = (frames.shape[1] // settings.patch_size, frames.shape[2] // settings.patch_size)
    tokens = grid[0] * grid[1] // settings.merge_size**2
    if kept is not None and len(kept) == tokens:
        kept = None
    num_tokens = tokens if kept is None else len(kept)
    return MediaItem(Patches(frames, settings), grid, num_tokens, digest_of(frames, kept, settings), kept)


def _tokens(frames: np.ndarray, settings: PixelSettings) -> np.ndarray:
    """Return the pixels that each token of a temporal patch stands for, [tokens, elements] uint8."""
    count, height, width, channels = frames.shape
    side = settings.factor
    tiles = frames.reshape(count, height // side, side, width // side, side, channels)
    return tiles.transpose(1, 3, 0, 2, 4, 5).reshape(-1, count * side * side * channels)


def digest_of(frames: np.ndarray, kept: np.ndarray | None, settings: PixelSettings) -> str:
    """Return a digest of everything that the patches are made from.

    Equal digests mean equal patches of an equal grid, and the same kept tokens.
    """
    named = {"naflex": settings.is_naflex, "divides": settings.divides, "windows": settings.has_windows}
    traits: list[object] = [name for name, is_so in named.items() if is_so]
    if settings.slices is not None:
        traits.append(settings.slices.canvas)
    made = (settings.kind, settings.scale, settings.mean, settings.std, *traits)
    cut = (settings.patch_size, settings.temporal_patch_size, settings.merge_size)
    left = None if kept is None else kept.tolist()
    content = hashlib.blake2b(repr((made, cut, frames.shape, left)).encode(), digest_size=32)
    content.update(frames.tobytes())
    return content.hexdigest()
