"""Resizing of images and frames, identical to the bit to torch's for uint8 with antialiasing, without torch.

transformers' video processor resizes like this. Pillow uses the same filters, but with finer weights and at times in
another order.

The size is whole tokens along both sides, within limits of pixels, and keeps the proportions nearly the same. The rule
is `smart_resize` of transformers' processors for Qwen2-VL (images) and Qwen3-VL (videos).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ostinato.errors import RequestError
from ostinato.media.processor_config import CORNER, CropSettings, PixelSettings

NEAREST, LANCZOS, BILINEAR, BICUBIC = 0, 1, 2, 3
"""Pillow's numbers of the filters that torch has too."""

ROWS = 16
"""Rows that are computed together: few enough for a core's own cache, many enough to be worth the calls."""

STRIP = 256
"""Rows of an image that are resized in width together as float32, so that a large one is never whole in that form."""

MAX_BITS = 22
"""Most fractional bits of a weight: a weighted pixel, and a sum of them, fit into int32."""


def resize(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Resize [h, w, 3] uint8 to [height, width, 3] uint8, with a filter's number: one of those above, or `CORNER`.

    Rows are resized first, then columns; between the two, pixels are rounded to whole numbers.
    """
    if resample in (NEAREST, CORNER):
        place = 0.5 if resample == NEAREST else 0.0
        rows, columns = _nearest(pixels.shape[0], height, place), _nearest(pixels.shape[1], width, place)
        return np.ascontiguousarray(pixels[rows][:, columns])
    if width != pixels.shape[1]:
        pixels = _transposed(_resized_rows(_transposed(pixels), width, resample))
    if height != pixels.shape[0]:
        pixels = _resized_rows(pixels, height, resample)
    return np.ascontiguousarray(pixels)


def resize_floats(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Resize [h, w, 3] uint8 to [height, width, 3] float32 like `resize`, but nothing is rounded to whole numbers.

    Values may be outside 0 to 255, where a filter overshoots. torch rounds sums differently, so that a value may
    differ from its by 0.001.
    """
    if resample == NEAREST or pixels.shape[:2] == (height, width):
        return resize(pixels, height, width, resample).astype(np.float32)
    values = pixels
    if width != pixels.shape[1]:
        values = np.empty((len(pixels), width, pixels.shape[2]), dtype=np.float32)
        for begin in range(0, len(pixels), STRIP):
            strip = pixels[begin : begin + STRIP].swapaxes(0, 1)
            values[begin : begin + STRIP] = _weighted_rows(strip, width, resample).swapaxes(0, 1)
    return values if height == len(pixels) else _weighted_rows(values, height, resample)


def _weighted_rows(values: np.ndarray, count: int, resample: int) -> np.ndarray:
    """Resize [h, w, 3], uint8 or float32, to [count, w, 3] float32."""
    starts, weights = antialiased_weights(len(values), count, resample, np.float32)
    rows = np.ascontiguousarray(values, dtype=np.float32)
    made = np.zeros((count, *values.shape[1:]), dtype=np.float32)
    for begin in range(0, count, ROWS):
        sums = made[begin : begin + ROWS]
        of_rows = weights[begin : begin + ROWS]
        for tap in range(weights.shape[1]):
            # Taps of weight 0 may be behind the last row.
            sums += np.take(rows, starts[begin : begin + ROWS] + tap, axis=0, mode="clip") * of_rows[:, tap, None, None]
    return made


def _nearest(size: int, new_size: int, place: float) -> np.ndarray:
    """Return the pixel of `size` at a `place` within each new one, [new_size] int64, computed in float32."""
    places = (np.arange(new_size, dtype=np.float32) + np.float32(place)) * (np.float32(size) / np.float32(new_size))
    return np.minimum(places.astype(np.int64), size - 1)


def _transposed(pixels: np.ndarray) -> np.ndarray:
    """Transpose [h, w, 3] to [w, h, 3], contiguous. A pixel moves as one element, which takes half the time."""
    whole = np.ascontiguousarray(pixels).view(f"V{pixels.shape[2]}")[..., 0]
    return np.ascontiguousarray(whole.T).view(np.uint8).reshape(pixels.shape[1], pixels.shape[0], -1)


def _resized_rows(pixels: np.ndarray, count: int, resample: int) -> np.ndarray:
    """Resize [h, w, 3] to [count, w, 3]: each new row is a weighted sum of old ones, in integers."""
    starts, weights, bits = _taps(len(pixels), count, resample)
    rows = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
    made = np.empty((count, rows.shape[1]), dtype=np.uint8)
    taken = np.empty((min(ROWS, count), rows.shape[1]), dtype=np.uint8)
    weighted, sums = np.empty(taken.shape, dtype=np.int32), np.empty(taken.shape, dtype=np.int32)
    for begin in range(0, count, ROWS):
        end = min(begin + ROWS, count)
        num = end - begin
        sums[:num] = 1 << bits >> 1  # one half, so that what is cut off below was rounded
        for tap in range(weights.shape[1]):
            # Taps of weight 0 may be behind the last row.
            np.take(rows, starts[begin:end] + tap, axis=0, mode="clip", out=taken[:num])
            np.multiply(taken[:num], weights[begin:end, tap, None], out=weighted[:num])
            sums[:num] += weighted[:num]
        sums[:num] >>= bits
        np.clip(sums[:num], 0, 255, out=sums[:num])
        made[begin:end] = sums[:num]
    return made.reshape(count, *pixels.shape[1:])


def _taps(size: int, new_size: int, resample: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Compute which of `size` old pixels make each new one, and their weights.

    Returns the first of them [new_size] int64, the weights from it on [new_size, taps] int32, and the number of
    fractional bits of a weight: the most with which no weight takes more than 15 bits, sign aside.
    """
    starts, weights = antialiased_weights(size, new_size, resample)
    largest, bits = float(weights.max()), 0
    while bits < MAX_BITS and int(0.5 + largest * (2 << bits)) < 1 << 15:
        bits += 1
    # Round halves away from zero.
    return starts, np.trunc(weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int32), bits


def antialiased_weights(
    size: int, new_size: int, resample: int, dtype: type[np.floating[Any]] = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """Compute which of `size` old values make each new one, and their weights, which add up to 1.

    Returns the first of them [new_size] int64 and the weights from it on [new_size, taps], computed in `dtype`. If
    there are fewer new values than old ones, the filter is wider by that ratio (antialiasing).
    """
    half_width, filter_of = FILTERS[resample]
    scale = dtype(size) / dtype(new_size)
    stretch = max(scale, dtype(1))
    centers = scale * (np.arange(new_size).astype(dtype) + dtype(0.5))
    starts = np.maximum((centers - half_width * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + half_width * stretch + 0.5).astype(np.int64), size)
    taps = np.arange((ends - starts).max())
    distances = ((taps + starts[:, None]).astype(dtype) - centers[:, None] + dtype(0.5)) * (dtype(1) / stretch)
    weights = np.where(taps < (ends - starts)[:, None], filter_of(distances), dtype(0))
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # added up one by one, as a sum in pairs would round differently
    return starts, weights


def _cubic(x: np.ndarray) -> np.ndarray:
    """Evaluate the cubic filter of Keys 1981, with a = -1/2.

    The paper is Cubic convolution interpolation for digital image processing.
    """
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


FILTERS: dict[int, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    LANCZOS: (3.0, lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)),
    BILINEAR: (1.0, lambda x: np.maximum(1 - np.abs(x), 0.0)),
    BICUBIC: (2.0, _cubic),
}
"""Number -> reach of the filter to either side, in pixels, and its value at a distance."""


MAX_ASPECT_RATIO = 200


def image_size(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width that an image is resized to, without what is then dropped.

    RequestError if one side is too long for the other, or for the encoder.
    """
    check_proportions(height, width)
    if settings.side:
        return (settings.side // settings.factor * settings.factor,) * 2
    if settings.max_side:
        return _largest(height, width, settings)
    if settings.in_floats:
        return _whole_patches(height, width, settings)
    if settings.slices is not None:
        return _of_area(height, width, settings)
    least = settings.factor if settings.is_naflex else 0
    return _fitted(height, width, settings.factor, 1, 1, settings.min_pixels, settings.max_pixels, least)


def _largest(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the largest sides of whole tokens that have nearly the proportions of the image, and few enough pixels.

    This is the rule of transformers' processor for Gemma 4.
    """
    factor = settings.factor
    root, longest = math.sqrt(settings.max_pixels / (height * width)), settings.max_pixels // factor**2
    rows, columns = (math.floor(root * side / factor) for side in (height, width))
    if rows == 0:
        rows, columns = 1, max(1, min(width // height, longest))
    elif columns == 0:
        rows, columns = max(1, min(height // width, longest)), 1
    if max(rows, columns) * factor > settings.max_side:
        raise RequestError(
            f"an image of {width}x{height} pixels would become one of {columns * factor}x{rows * factor}, and the "
            f"encoder has positions for {settings.max_side} along a side; give it fewer max_pixels"
        )
    return rows * factor, columns * factor


def _whole_patches(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return sides of whole patches around the image, scaled into the limits, and then made whole tokens.

    This is the rule of transformers' processor for Nemotron 3 Nano Omni.
    """
    patch, merge = settings.patch_size, settings.merge_size
    least, most = (pixels // patch**2 for pixels in (settings.min_pixels, settings.max_pixels))
    rows, columns = (round(side / patch + 0.5) for side in (height, width))
    shrink = min(math.sqrt(most / (rows * columns)), 1.0)
    rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
    if most > least and 0 < rows * columns < least:
        grow = math.sqrt(least / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    if rest := rows % merge:
        rows = rows + merge - rest if (rows + merge - rest) * columns <= most else max(merge, rows - rest)
    if rest := columns % merge:
        columns = columns + merge - rest if rows * (columns + merge - rest) <= most else max(merge, columns - rest)
    return max(rows, merge) * patch, max(columns, merge) * patch


def _of_area(height: float, width: float, settings: PixelSettings) -> tuple[int, int]:
    """Return the sides of whole tokens nearest to those of an image of `max_pixels` with these proportions.

    This is the rule of transformers' processor for MiniCPM-V 4.7.
    """
    ratio, factor = width / height, settings.factor
    rows = int(math.isqrt(settings.max_pixels) / math.sqrt(ratio))
    sides = rows, int(rows * ratio)
    return max(round(sides[0] / factor) * factor, factor), max(round(sides[1] / factor) * factor, factor)


def slice_grid(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the rows and columns of slices that follow an image; (1, 1) if it is not cut.

    Of as many slices as the image has times `max_pixels`, or one more or less, the grid with the nearest proportions is
    taken; of equally near ones the one with more rows. This is the rule of transformers' processor for MiniCPM-V 4.7.
    """
    assert settings.slices is not None, "the model has slices"
    most = settings.slices.max_slices
    count = min(math.ceil(width * height / math.isqrt(settings.max_pixels) ** 2), most)
    if count <= 1:
        return 1, 1
    counts = [each for each in (count - 1, count, count + 1) if 1 < each <= most]
    grids = [(rows, each // rows) for each in counts for rows in range(1, each + 1) if each % rows == 0]
    ratio, nearest, best = math.log(width / height), math.inf, (1, 1)
    for rows, columns in grids:
        distance = abs(ratio - math.log(columns / rows))
        if distance < nearest or (distance == nearest and rows > best[0]):
            nearest, best = distance, (rows, columns)
    return best


def slice_size(height: int, width: int, grid: tuple[int, int], settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width of each slice of an image that is cut into a grid of rows and columns."""
    sides = [max(round(side / count) * count, count) / count for side, count in zip((height, width), grid, strict=True)]
    return _of_area(sides[0], sides[1], settings)


def tile_grid(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the rows and columns of tiles that an image is cut into; (1, 1) if it is not cut.

    Of the grids with as many tiles as `settings.tiles` allows, the one with the nearest proportions is taken; of
    equally near ones a later and larger one if the image has more than half of its pixels. This is the rule of
    transformers' processor for LFM2-VL.
    """
    tiles, factor = settings.tiles, settings.factor
    if tiles is None:
        return 1, 1
    rounded = [max(settings.patch_size, round(side / factor) * factor) for side in (height, width)]
    if rounded[0] * rounded[1] <= settings.max_pixels * tiles.tolerance:
        return 1, 1
    sides = range(1, tiles.max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides]
    grids = sorted((grid for grid in grids if tiles.min_tiles <= grid[0] * grid[1] <= tiles.max_tiles), key=math.prod)
    nearest, best = math.inf, (1, 1)
    for columns, rows in grids:
        distance = abs(width / height - columns / rows)
        is_larger = height * width > 0.5 * tiles.size**2 * columns * rows
        if distance < nearest or (distance == nearest and is_larger):
            nearest, best = distance, (rows, columns)
    return best


def crop_grid(height: int, width: int, crops: CropSettings) -> tuple[int, int]:
    """Return the rows and columns of crops that follow an image; (0, 0) if it has none.

    Crops are next to each other along the longer side. This is the rule of transformers' processor for Gemma 3.
    """
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < crops.min_ratio:
        return 0, 0
    count = min(longer // crops.min_size, math.floor(longer / shorter + 0.5))
    count = min(crops.max_crops, max(2, count))
    if min(math.ceil(longer / count), shorter) < crops.min_size:
        return 0, 0
    return (1, count) if width >= height else (count, 1)


def video_size(num_frames: int, height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width of a video's resized frames; the limits hold for all of them together.

    With `max_side` they hold for each.

    RequestError if one side is too long for the other, or for fewer frames than a temporal patch has.
    """
    factor, temporal = settings.factor, settings.temporal_patch_size
    if num_frames < temporal:
        raise RequestError(f"a video needs at least {temporal} frames, not {num_frames}; give one frame as an image")
    if min(height, width) < factor and not settings.max_side:
        enlarged = max(factor / height, factor / width)
        height, width = int(height * enlarged), int(width * enlarged)
    check_proportions(height, width)
    if settings.max_side:
        return _largest(height, width, settings)
    max_pixels = settings.max_pixels
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * factor**2, max_pixels // num_frames)
        max_pixels = num_frames * max(share, int(settings.min_pixels * 1.05))
    rounded = round(num_frames / temporal) * temporal
    return _fitted(height, width, factor, num_frames, rounded, settings.min_pixels, max_pixels)


def _fitted(
    height: int,
    width: int,
    factor: int,
    num_frames: int,
    rounded_frames: int,
    min_pixels: int,
    max_pixels: int,
    least: int = 0,
) -> tuple[int, int]:
    sides = (height, width)
    rounded = [max(least, round(side / factor) * factor) for side in sides]
    pixels = rounded_frames * rounded[0] * rounded[1]
    if pixels > max_pixels:
        shrink = math.sqrt((num_frames * height * width) / max_pixels)
        rounded = [max(factor, math.floor(side / shrink / factor) * factor) for side in sides]
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        rounded = [math.ceil(side * grow / factor) * factor for side in sides]
    return rounded[0], rounded[1]


def check_proportions(height: int, width: int) -> None:
    """Raise RequestError for an image without pixels, or with one side too long for the other."""
    if min(height, width) < 1:
        raise RequestError(f"an image of {width}x{height} pixels is empty; both sides need at least 1 pixel")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise RequestError(
            f"an image of {width}x{height} pixels is too narrow: one side may be at most {MAX_ASPECT_RATIO} times the "
            "other; cut it into pieces"
        )
