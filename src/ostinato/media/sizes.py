"""Size that an image or a video is resized to: whole tokens along both sides, within limits of pixels.

Proportions stay nearly the same. The rule is `smart_resize` of transformers' processors for Qwen2-VL (images) and
Qwen3-VL (videos).
"""

from __future__ import annotations

import math

from ostinato.errors import RequestError
from ostinato.media.settings import PixelSettings

MAX_ASPECT_RATIO = 200


def image_size(height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width that an image is resized to. RequestError if one side is too long for the other."""
    check_proportions(height, width)
    return _fitted(height, width, settings.factor, 1, 1, settings.min_pixels, settings.max_pixels)


def video_size(num_frames: int, height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Return the height and width of a video's resized frames; the limits hold for all of them together.

    RequestError if one side is too long for the other, or for fewer frames than a temporal patch has.
    """
    factor, temporal = settings.factor, settings.temporal_patch_size
    if num_frames < temporal:
        raise RequestError(f"a video needs at least {temporal} frames, not {num_frames}; give one frame as an image")
    if min(height, width) < factor:
        enlarged = max(factor / height, factor / width)
        height, width = int(height * enlarged), int(width * enlarged)
    check_proportions(height, width)
    max_pixels = settings.max_pixels
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * factor**2, max_pixels // num_frames)
        max_pixels = num_frames * max(share, int(settings.min_pixels * 1.05))
    rounded = round(num_frames / temporal) * temporal
    return _fitted(height, width, factor, num_frames, rounded, settings.min_pixels, max_pixels)


def _fitted(
    height: int, width: int, factor: int, num_frames: int, rounded_frames: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    sides = (height, width)
    rounded = [round(side / factor) * factor for side in sides]
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
