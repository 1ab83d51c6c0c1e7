"""Pixel settings of a checkpoint's processor files: how it wants images and videos prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ostinato.errors import ModelError
from ostinato.formats.checkpoint_json import read_checkpoint_json
from ostinato.json_io import JsonMapping
from ostinato.plan.layer_specs import VisionSpec

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALVES, _ZEROS, _ONES = (0.5,) * 3, (0.0,) * 3, (1.0,) * 3
_MAX_TILES = 64
_LARGEST = 1e30  # of numbers that pixels are computed with, in float32
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_OF_VIDEOS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
CORNER = -1
"""Number of torch's filter `nearest`: the pixel at a new one's corner. Pillow's takes that at its middle."""
_RESAMPLES = {"image": _OF_VIDEOS | {4: "box", 5: "hamming"}, "video": _OF_VIDEOS}


@dataclass(frozen=True)
class TileSettings:
    """Tiles that a large image is cut into, in a grid of nearly its proportions.

    Defaults of settings that a checkpoint's files leave out are those of transformers' `Lfm2VlImageProcessor`.
    """

    size: int
    """Pixels along a tile's sides."""
    min_tiles: int
    max_tiles: int
    has_thumbnail: bool
    """True if the whole image, resized as one that is not cut, follows its tiles."""
    tolerance: float
    """Images are cut if they have more than this times `max_pixels`."""


@dataclass(frozen=True)
class CropSettings:
    """Crops of a long image, which follow the whole image ("pan and scan").

    Defaults of settings that a checkpoint's files leave out are those of transformers' `Gemma3Processor`.
    """

    min_size: int
    """Least pixels along the sides of a crop; an image that would have smaller ones has none."""
    max_crops: int
    min_ratio: float
    """Least ratio of the longer side to the shorter one of an image that has crops."""


@dataclass(frozen=True)
class SliceSettings:
    """Slices of a large image, which follow the whole image, made small (MiniCPM-V 4.7).

    Both have about the area `PixelSettings.max_pixels`. Defaults of settings that a checkpoint's files leave out are
    those of transformers' `MiniCPMV4_6ImageProcessor`.
    """

    max_slices: int
    """Most slices; 1 if images are not cut."""
    numbers_images: bool
    """True if an image's number is written before it."""
    canvas: tuple[int, int] = (0, 0)
    """Rows and columns of tokens of all slices of a cut image, over which the whole image has its positions.

    So images that differ in nothing else are different items for a cache.
    """


@dataclass(frozen=True)
class PixelSettings:
    """Settings that turn images, or the frames of videos, into patches.

    Defaults of settings that a checkpoint's files leave out are those of transformers' `Qwen2VLImageProcessor` and
    `Qwen3VLVideoProcessor`.
    """

    kind: Literal["image", "video"]
    min_pixels: int
    """Least pixels of an image, or of all frames of a video together, after resizing."""
    max_pixels: int
    resample: int
    """Pillow's number of a filter, also used for frames, or `CORNER`."""
    scale: float
    """Factor of a pixel's value from 0 to 255."""
    mean: tuple[float, ...]
    """Mean per channel, subtracted after scaling."""
    std: tuple[float, ...]
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    """True if a frame has at most `max_video_tokens` tokens, and at most its share of `max_pixels`."""
    max_video_tokens: int = 768
    tiles: TileSettings | None = None
    """Tiles of large images; None if they are not cut."""
    crops: CropSettings | None = None
    """Crops of long images; None if they have none."""
    is_naflex: bool = False
    """True if patches have their channels last, and pixels are resized and normalised by torch."""
    side: int = 0
    """Pixels along both sides of every image, which torch resizes and normalises; 0 if images keep proportions.

    Those beyond whole patches are then dropped.
    """
    max_side: int = 0
    """Most pixels along a side of images that are as large as `max_pixels` allows, and that torch resizes and scales.

    0 if images are resized only as far as the limits demand.
    """
    divides: bool = False
    """True if a pixel is divided by 1 / `scale`, as torch does if it normalises too; only with `max_side`."""
    in_floats: bool = False
    """True if an image's grid is rounded up to whole patches, and its pixels are resized as float32 without limits."""
    has_windows: bool = False
    """True if the patches of two by two are next to each other within a token's."""
    slices: SliceSettings | None = None
    """Slices of large images; None if the model has none, and no canvas."""
    most_pixels: int = 0
    """Most pixels of an image whatever the number of images in a conversation, which may raise `max_pixels`; 0: any."""

    @property
    def factor(self) -> int:
        """Pixels along a side of the square that one token stands for."""
        return self.patch_size * self.merge_size

    def of_images(self, count: int) -> PixelSettings:
        """Return the settings of each of `count` images of a conversation (Nemotron 3 Nano Omni)."""
        if not self.in_floats:
            return self
        shared = self.min_pixels * count
        return replace(self, max_pixels=max(self.max_pixels, min(shared, self.most_pixels or shared)))


@dataclass(frozen=True)
class MediaSettings:
    """Pixel settings of a checkpoint's images and of its videos."""

    image: PixelSettings
    video: PixelSettings


def load_media_settings(directory: Path, vision: VisionSpec) -> MediaSettings:
    """Read `processor_config.json`, or else `preprocessor_config.json` and `video_preprocessor_config.json`.

    ModelError if a file is damaged, contradicts the encoder or asks for what is not implemented.
    """
    whole, image_path, video_path = (
        directory / f"{name}_config.json" for name in ("processor", "preprocessor", "video_preprocessor")
    )
    nested = read_checkpoint_json(directory, whole.name)

    def reader(part: str, path: Path) -> _Reader:
        values = nested.get(part)
        if isinstance(values, dict):
            return _Reader(values, whole, vision)
        return _Reader(read_checkpoint_json(directory, path.name), path, vision)

    images = reader("image_processor", image_path)
    # As in transformers, the file of images stands in for one of videos that is absent.
    videos = reader("video_processor", video_path if read_checkpoint_json(directory, video_path.name) else image_path)
    if nested.get("use_image_special_tokens", True) is not True:
        raise ModelError(
            f"{whole} has use_image_special_tokens = {nested['use_image_special_tokens']!r}; supported: true"
        )
    if vision.positions_by_axis:
        image = images.fitted("image", 280)
    elif vision.image_side:
        image = images.square()
    elif vision.canvas is not None:
        image = images.sliced()
    elif vision.crops_positions:
        image = images.in_floats()
    elif vision.cuts_tiles:
        image = images.tiled()
    else:
        return MediaSettings(
            image=images.settings("image", 56 * 56, 28 * 28 * 1280, _CLIP_MEAN, _CLIP_STD),
            video=videos.settings("video", 128 * 32 * 32, 768 * 32 * 32, _HALVES, _HALVES),
        )
    # Frames of videos are like images.
    takes_videos = vision.positions_by_axis and vision.video_token_id is not None
    return MediaSettings(image, videos.fitted("video", 70) if takes_videos else replace(image, kind="video"))


@dataclass(frozen=True)
class _Reader:
    """Reader of one processor's settings from their file."""

    values: JsonMapping
    path: Path
    vision: VisionSpec

    def settings(
        self,
        kind: Literal["image", "video"],
        min_pixels: int,
        max_pixels: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> PixelSettings:
        self._check_steps()
        size = self._of("size", dict, {})
        # transformers' processor of videos has no other name for the edges of `size`.
        names = ("min_pixels", "max_pixels") if kind == "image" else ("shortest_edge", "longest_edge")
        limits = (
            self._limit(names[0], size, "shortest_edge", min_pixels),
            self._limit(names[1], size, "longest_edge", max_pixels),
        )
        if limits[0] > limits[1]:
            raise ModelError(f"{self.path}: {limits[0]} pixels at least, and {limits[1]} at most, cannot both hold")
        return PixelSettings(
            kind,
            *limits,
            resample=self._resample(kind, 3),
            scale=self._scale(),
            mean=self._channels("image_mean", mean),
            std=self._channels("image_std", std),
            patch_size=self._as_encoder("patch_size", self.vision.patch_size),
            temporal_patch_size=self._as_encoder("temporal_patch_size", self.vision.temporal_patch_size),
            merge_size=self._as_encoder("merge_size", self.vision.merge_size),
            max_frames=self._count("max_frames", 768),
            cap_pixels_per_frame=bool(self._of("cap_pixels_per_frame", bool, False)),
            max_video_tokens=self._count("max_video_tokens", 768),
        )

    def tiled(self) -> PixelSettings:
        """Read the settings of images that are cut into tiles (LFM2-VL)."""
        self._check_steps()
        least, most = self._count("min_image_tokens", 64), self._count("max_image_tokens", 256)
        patch = self._as_encoder("encoder_patch_size", self.vision.patch_size)
        merge = self._as_encoder("downsample_factor", self.vision.merge_size)
        size, area = self._count("tile_size", 512), (patch * merge) ** 2
        if least > most or size % (patch * merge):
            raise ModelError(
                f"{self.path} has images of {least} to {most} tokens and tiles of {size} pixels; min_image_tokens "
                f"should not be above max_image_tokens, and tile_size be one of the multiples of {patch * merge}"
            )
        tolerance = self._value("max_pixels_tolerance", 2.0)
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
            raise self._error("max_pixels_tolerance", "a number")
        few, many = self._count("min_tiles", 2), self._count("max_tiles", 10)
        if few > many or many > _MAX_TILES:
            raise self._error("max_tiles", f"from min_tiles, which is {few}, to {_MAX_TILES}")
        is_cut = self._of("do_image_splitting", bool, True) and many > 1
        tiles = TileSettings(size, few, many, self._of("use_thumbnail", bool, True), float(tolerance))
        return PixelSettings(
            "image",
            least * area,
            most * area,
            **self._pixels(self._resample("video", 2)),
            tiles=tiles if is_cut else None,
            is_naflex=True,
        )

    def square(self) -> PixelSettings:
        """Read the settings of images that are resized to one size (Gemma 3)."""
        self._check_steps()
        vision = self.vision
        size = self._of("size", dict, {"height": vision.image_side, "width": vision.image_side})
        given, side = size.get("height"), vision.image_side
        if size != {"height": given, "width": given} or given not in range(side, side + vision.patch_size):
            raise self._error("size", f"height and width {side}, as the encoder has them in config.json")
        return PixelSettings(
            "image",
            side**2,
            side**2,
            **self._pixels(self._resample("video", 2)),
            crops=self._crops() if self._of("do_pan_and_scan", bool, False) else None,
            side=given,
        )

    def _crops(self) -> CropSettings:
        size, most = self._count("pan_and_scan_min_crop_size", 256), self._count("pan_and_scan_max_num_crops", 4)
        if size < most:
            raise self._error("pan_and_scan_min_crop_size", f"at least pan_and_scan_max_num_crops, which is {most}")
        ratio = self._value("pan_and_scan_min_ratio_to_activate", 1.2)
        if not isinstance(ratio, int | float) or ratio < 1:
            raise self._error("pan_and_scan_min_ratio_to_activate", "a number of at least 1")
        return CropSettings(size, most, float(ratio))

    def fitted(self, kind: Literal["image", "video"], tokens: int) -> PixelSettings:
        """Read the settings of images or frames that are as large as a number of tokens allows (Gemma 4).

        `tokens` is its default.
        """
        self._check_steps([step for step in _STEPS if step != "do_normalize"])
        normalises = self._of("do_normalize", bool, kind == "video")
        if normalises and (
            kind == "image"
            or self._channels("image_mean", _ZEROS) + self._channels("image_std", _ONES) != _ZEROS + _ONES
        ):
            raise self._error("do_normalize", "false; the encoder expects pixels from 0 to 1")
        vision, most = self.vision, self._count("max_soft_tokens", tokens)
        if most not in _SOFT_TOKENS:
            raise self._error("max_soft_tokens", f"one of {', '.join(map(str, _SOFT_TOKENS))}")
        self._check_token_side()
        # Gemma 4's model makes the range that of -1 to 1.
        mean, std = (0.0, 1.0) if vision.is_encoder_free else (0.5, 0.5)
        # transformers gives Gemma 4's number to torchvision, which takes 0 for torch's filter of that name.
        return PixelSettings(
            kind,
            vision.token_side**2,
            most * vision.token_side**2,
            resample=self._resample("video", 3) or CORNER,
            scale=self._scale(),
            mean=(mean,) * vision.in_channels,
            std=(std,) * vision.in_channels,
            patch_size=vision.patch_size,
            temporal_patch_size=1,
            merge_size=vision.merge_size,
            is_naflex=True,
            max_side=vision.num_positions // 2 * vision.patch_size,
            divides=normalises,
            max_frames=self._count("num_frames", 32) if kind == "video" else PixelSettings.max_frames,
        )

    def _check_token_side(self) -> None:
        """Check the pixels along a token's side; without an encoder they are one patch, whatever the parts are."""
        vision, names = self.vision, ("patch_size", "pooling_kernel_size")
        if not vision.is_encoder_free:
            for name, size in zip(names, (vision.patch_size, vision.merge_size), strict=True):
                self._as_encoder(name, size)
        elif any(self.values.get(name) is not None for name in names):
            patch, pooled = (self._count(name, default) for name, default in zip(names, (16, 3), strict=True))
            if patch * pooled != vision.token_side:
                raise ModelError(
                    f"{self.path} has patch_size {patch} times pooling_kernel_size {pooled}, which should be "
                    f"{vision.token_side}, as config.json has it"
                )

    def sliced(self) -> PixelSettings:
        """Read the settings of images of one area, and of the slices of larger ones (MiniCPM-V 4.7)."""
        # transformers resizes whatever `do_resize` is.
        self._check_steps([step for step in _STEPS if step != "do_resize"])
        vision, side = self.vision, self._count("scale_resolution", 448)
        patch = self._as_encoder("patch_size", vision.patch_size)
        if self._value("downsample_mode", "16x") != (mode := f"{vision.patches_per_token}x"):
            raise self._error("downsample_mode", f"{mode!r}, as config.json has it")
        if side < patch * vision.merge_size:
            raise self._error("scale_resolution", f"at least {patch * vision.merge_size}, the pixels of a token")
        slices = self._count("max_slice_nums", 9)
        if slices > _MAX_TILES:
            raise self._error("max_slice_nums", f"at most {_MAX_TILES}")
        return PixelSettings(
            "image",
            side**2,
            side**2,
            **self._pixels(self._resample("video", 3)),
            has_windows=vision.has_windows,
            slices=SliceSettings(
                slices if self._of("slice_mode", bool, True) else 1, self._of("use_image_id", bool, True)
            ),
        )

    def in_floats(self) -> PixelSettings:
        """Read the settings of images within limits of patches, resized as float32 (Nemotron 3 Nano Omni)."""
        self._check_steps()
        vision, ratio = self.vision, self._value("downsample_ratio", 0.5)
        if ratio != 1 / vision.merge_size:
            raise self._error("downsample_ratio", f"{1 / vision.merge_size}, as config.json has it")
        patch, length = self._as_encoder("patch_size", vision.patch_size), self._count("max_model_len", 16384)
        least, most = self._count("min_num_patches", 1024), self.values.get("max_num_patches")
        most = 0 if most == 0 else self._count("max_num_patches", 13312)
        fitting = max((length - 4) * vision.patches_per_token, least)
        fitting = max(min(fitting, most) if most else fitting, least)
        # Released checkpoints have the other names, which do not count beside these.
        mean, std = (f"image_{name}" if f"image_{name}" in self.values else f"norm_{name}" for name in ("mean", "std"))
        return PixelSettings(
            "image",
            least * patch**2,
            fitting * patch**2,
            **self._pixels(self._resample("video", 3), (mean, _CLIP_MEAN), (std, _CLIP_STD)),
            in_floats=True,
            most_pixels=most * patch**2,
        )

    def _pixels(
        self,
        resample: int,
        mean: tuple[str, tuple[float, ...]] = ("image_mean", _HALVES),
        std: tuple[str, tuple[float, ...]] = ("image_std", _HALVES),
    ) -> dict[str, Any]:
        """Return how pixels become patches of the encoder's sizes; `mean` and `std` are names and defaults."""
        return {
            "resample": resample,
            "scale": self._scale(),
            "mean": self._channels(*mean),
            "std": self._channels(*std),
            "patch_size": self.vision.patch_size,
            "temporal_patch_size": 1,
            "merge_size": self.vision.merge_size,
        }

    def _check_steps(self, steps: Sequence[str] = _STEPS) -> None:
        for step in steps:
            if self._value(step, True) is not True:
                raise self._error(step, "true")

    def _resample(self, kind: str, default: int) -> int:
        resample, filters = self._value("resample", default), _RESAMPLES[kind]
        if type(resample) is not int or resample not in filters:
            raise self._error("resample", "one of " + ", ".join(f"{n} ({name})" for n, name in filters.items()))
        return resample

    def _scale(self) -> float:
        scale = self._value("rescale_factor", 1 / 255)
        if not isinstance(scale, int | float) or not 1 / _LARGEST < scale < _LARGEST:
            raise self._error("rescale_factor", "a number above 0")
        return float(scale)

    def _value(self, name: str, default: object) -> Any:
        """Return a value, unchecked; null means the default, as in transformers."""
        value = self.values.get(name)
        return default if value is None else value

    def _of(self, name: str, kind: type, default: object) -> Any:
        value = self._value(name, default)
        if not isinstance(value, kind):
            raise self._error(name, f"of the type {kind.__name__}")
        return value

    def _count(self, name: str, default: object) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.path} has {name} = {value!r}, which should be a whole number of at least 1")
        return value

    def _limit(self, name: str, size: Mapping[str, object], edge: str, default: int) -> int:
        if size and edge not in size and self._value(name, None) is None:
            raise self._error("size", f"with {edge}, the number of pixels of an image that is too small or too large")
        return self._count(name, size.get(edge, default))

    def _as_encoder(self, name: str, of_encoder: int) -> int:
        if self._count(name, of_encoder) != of_encoder:
            raise self._error(name, f"{of_encoder}, as the encoder has it in config.json")
        return of_encoder

    def _channels(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        values = self._of(name, list, list(default))
        count, is_scale = self.vision.in_channels, name.endswith("std")
        numbers = [v for v in values if isinstance(v, int | float) and abs(v) < _LARGEST and (v > 0 or not is_scale)]
        if len(values) != count or len(numbers) != count:
            raise self._error(name, f"{count} numbers" + " above 0" * is_scale)
        return tuple(float(value) for value in values)

    def _error(self, name: str, expected: str) -> ModelError:
        return ModelError(f"{self.path} has {name} = {self.values.get(name)!r}, which should be {expected}")
