"""Frames become the patches that transformers' video processor makes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_processing_utils import BaseVideoProcessor

from ostinato.errors import RequestError
from ostinato.media.preprocess import process_video
from ostinato.media.processor_config import PixelSettings, load_media_settings
from ostinato.media.resize import video_size
from ostinato.runner.image_encoder import patch_positions
from tests.support.gemma4_processors import GEMMA4, UNIFIED
from tests.support.media_cases import EMBEDDED, FITTED, drawn, pixel_settings, vision_spec

SIDES = st.integers(5, 300)
MODES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


class WithTorch(BaseVideoProcessor):
    """What torchvision does for transformers' processors, by torch alone: one function of it for each."""

    def resize(self, image: torch.Tensor, size: SizeDict, resample: int, **_) -> torch.Tensor:
        [frames], size = image, (size.height, size.width)
        if resample == 0:
            return F.interpolate(frames, size, mode="nearest-exact")[None]
        return F.interpolate(frames, size, mode=MODES[resample], antialias=True, align_corners=False)[None]

    def normalize(self, image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, **_) -> torch.Tensor:
        return (image - mean[:, None, None]) / std[:, None, None]


class Theirs(Qwen3VLVideoProcessor, WithTorch):
    """Transformers' processor, which imports without torchvision, and runs with what stands in for it."""


def theirs(frames: list[Image.Image], own: PixelSettings) -> tuple[np.ndarray, tuple[int, ...]]:
    """Patches and the grid: temporal patches, height and width."""
    out = Theirs()._preprocess(
        [torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)],
        do_resize=True,
        size=SizeDict(shortest_edge=own.min_pixels, longest_edge=own.max_pixels),
        resample=own.resample,
        do_rescale=True,
        rescale_factor=own.scale,
        do_normalize=True,
        image_mean=own.mean,
        image_std=own.std,
        patch_size=own.patch_size,
        temporal_patch_size=own.temporal_patch_size,
        merge_size=own.merge_size,
        cap_pixels_per_frame=own.cap_pixels_per_frame,
    )
    return out["pixel_values_videos"].numpy(), tuple(out["video_grid_thw"][0].tolist())


class _Fitted(WithTorch):
    def aspect_ratio_preserving_resize(
        self, video: torch.Tensor, patch_size: int, max_patches: int, pooling_kernel_size: int, resample: int
    ) -> torch.Tensor:
        size = GEMMA4.get_aspect_ratio_preserving_size(*video.shape[-2:], patch_size, max_patches, pooling_kernel_size)
        return F.interpolate(video, size, mode=MODES[resample], antialias=True, align_corners=False)


class OfGemma4(_Fitted, GEMMA4.Gemma4VideoProcessor):
    """Transformers' processor for Gemma 4, with what stands in for torchvision."""


class OfUnified(_Fitted, UNIFIED.Gemma4UnifiedVideoProcessor):
    """That for Gemma 4 Unified."""


def test_settings_of_frames_come_from_the_file_that_transformers_reads(tmp_path):
    """The file of images stands in for that of videos."""
    vision = vision_spec(**FITTED | {"video_token_id": 9})

    def most_tokens():
        own = load_media_settings(tmp_path, vision).video
        return own.max_pixels // own.factor**2

    assert most_tokens() == 70
    for name, tokens in (("preprocessor", 560), ("video_preprocessor", 140)):
        (tmp_path / f"{name}_config.json").write_text(json.dumps({"max_soft_tokens": tokens}))
        assert BaseVideoProcessor.get_video_processor_dict(tmp_path)[0] == {"max_soft_tokens": tokens}
        assert most_tokens() == tokens
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {"max_soft_tokens": 280}}))
    assert most_tokens() == 280


@pytest.mark.parametrize(("height", "width"), [(90, 160), (300, 220), (30, 700), (48, 96)])
@pytest.mark.parametrize("most", [70, 140])
@pytest.mark.parametrize("processor", [OfGemma4, OfUnified])
def test_frames_of_as_many_tokens_as_fit_have_the_pixels_of_transformers(tmp_path, processor, most, height, width):
    """Gemma 4's model doubles pixels and subtracts 1; Gemma 4 Unified takes them as they are."""
    is_unified = processor is OfUnified
    vision = vision_spec(**(EMBEDDED if is_unified else FITTED) | {"video_token_id": 9})
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {"max_soft_tokens": most}}))
    own = load_media_settings(tmp_path, vision).video
    frames = [drawn(height, width, seed) for seed in range(3)]
    video = process_video(frames, 3, 0.5, own)
    assert video.timestamps == (0.0, 2.0, 4.0)
    out = processor()._preprocess(
        [torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)],
        do_resize=True, resample=3, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
        image_mean=(0.0,) * 3, image_std=(1.0,) * 3, return_tensors="pt",
        patch_size=16, max_soft_tokens=most, pooling_kernel_size=3,
    )  # fmt: skip
    assert out["num_frames_per_video"].tolist() == [3]
    pixels, places = out["pixel_values_videos"], out["video_position_ids"]
    for item, values, positions in zip(video.items, pixels, places, strict=True):
        rows, columns = patch_positions(item.grid, vision.merge_size).T
        order = rows * item.grid[1] + columns
        expected = (values if is_unified else 2 * (values - 0.5)).numpy()
        np.testing.assert_array_equal(item.patches, expected[order])
        np.testing.assert_array_equal(np.stack((columns, rows), axis=1), positions.numpy()[order])
        assert (positions.numpy()[len(order) :] == -1).all()


def assert_equals_theirs(frames: list[Image.Image], own: PixelSettings) -> None:
    items = process_video(frames, len(frames), 2.0, own).items
    patches, grid = theirs(frames, own)
    assert grid == (len(items), *items[0].grid)
    np.testing.assert_array_equal(np.concatenate([np.asarray(item.patches) for item in items]), patches)


@given(height=SIDES, width=SIDES, count=st.integers(2, 5), low=st.integers(1, 40), high=st.integers(40, 400))
@settings(max_examples=40, deadline=None)
def test_any_size_and_limits_give_the_patches_of_transformers(height, width, count, low, high):
    own = pixel_settings("video", min_pixels=low * 1024, max_pixels=high * 1024)
    assert_equals_theirs([drawn(height, width, seed) for seed in range(count)], own)


@pytest.mark.parametrize(("height", "width"), [(720, 1280), (480, 640), (352, 640)])
def test_frames_of_usual_sizes_have_the_patches_of_transformers(height, width):
    own = pixel_settings("video", min_pixels=4096, max_pixels=2 * 352 * 640)
    assert_equals_theirs([drawn(height, width, seed) for seed in range(2)], own)


@pytest.mark.parametrize("resample", [0, 1, 2, 3])
def test_other_filters_means_and_scales_give_the_patches_of_transformers(resample):
    own = pixel_settings(
        "video",
        max_pixels=200_000,
        resample=resample,
        scale=1 / 127.5,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        patch_size=14,
        temporal_patch_size=3,
        cap_pixels_per_frame=True,
    )
    assert_equals_theirs([drawn(150, 222, seed) for seed in range(4)], own)


@given(
    num_frames=st.integers(2, 40), height=st.integers(1, 4000), width=st.integers(1, 4000), high=st.integers(64, 4096)
)
@settings(max_examples=300, deadline=None)
@example(2, 64, 64, 64)
@example(8, 5, 5, 64)
@example(13, 720, 1280, 64)
@example(2, 1, 199, 64)
@example(2, 3000, 16, 64)
def test_a_video_has_the_size_that_transformers_gives_it(num_frames, height, width, high):
    own = pixel_settings("video", min_pixels=16384, max_pixels=high * 1024)
    if max(height, width) / min(height, width) > 100:
        return
    assert video_size(num_frames, height, width, own) == smart_resize(
        num_frames, height, width, temporal_factor=2, factor=32, min_pixels=16384, max_pixels=high * 1024
    )


@given(
    num_frames=st.integers(2, 40), height=st.integers(1, 4000), width=st.integers(1, 4000), high=st.integers(64, 4096)
)
@settings(max_examples=200, deadline=None)
def test_a_video_keeps_to_its_limits_in_whole_tokens(num_frames, height, width, high):
    own = pixel_settings("video", min_pixels=16384, max_pixels=high * 1024)
    if max(height, width) / min(height, width) > 100:
        return
    found = video_size(num_frames, height, width, own)
    assert min(found) >= 32
    assert found[0] % 32 == found[1] % 32 == 0
    # A side is never less than a token, which the limit yields to.
    assert num_frames // 2 * 2 * found[0] * found[1] <= high * 1024 or min(found) == 32


def test_capped_frames_share_the_pixels_of_a_video():
    own = pixel_settings("video", min_pixels=4096, max_pixels=4_000_000, cap_pixels_per_frame=True, max_video_tokens=4)
    assert video_size(4, 500, 500, own) == (64, 64)
    assert video_size(4, 500, 500, replace(own, cap_pixels_per_frame=False)) == (512, 512)


def test_a_temporal_patch_holds_its_frames_one_after_the_other_in_each_channel():
    own = pixel_settings("video", min_pixels=1024, max_pixels=4096, scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    frames = [Image.new("RGB", (32, 32), (i, 100 + i, 200 + i)) for i in range(4)]
    video = process_video(frames, len(frames), 2.0, own)
    assert [item.grid for item in video.items] == [(2, 2), (2, 2)]
    rows = np.asarray(video.items[1].patches).reshape(4, 3, 2, 256)
    assert (rows[:, :, 0] == np.array([2, 102, 202])[None, :, None]).all()
    assert (rows[:, :, 1] == np.array([3, 103, 203])[None, :, None]).all()


def test_a_last_frame_fills_its_temporal_patch_and_times_are_means():
    own = pixel_settings("video")
    frames = [drawn(64, 64, seed) for seed in range(5)]
    video = process_video(frames, len(frames), 2.0, own)
    assert video.timestamps == (0.25, 1.25, 2.0)
    halves = np.asarray(video.items[2].patches).reshape(-1, 3, 2, 256)
    np.testing.assert_array_equal(halves[:, :, 0], halves[:, :, 1])


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        ([], 1.0, "at least 2 frames, not 0"),
        ([drawn(64, 64)], 1.0, "at least 2 frames, not 1"),
        ([drawn(64, 64), drawn(64, 32)], 1.0, "the first is of 64x64 pixels, and one of 32x64"),
        ([drawn(64, 64)] * 2, 0, "fps '0'"),
        ([drawn(64, 64)] * 2, float("nan"), "fps 'nan'"),
        ([drawn(64, 64)] * 2, "2", "fps '2'"),
        ([drawn(64, 64)] * 2, True, "fps 'True'"),
        ([drawn(64, 64)] * 2, 5e-324, "fps '5e-324'"),
        ([drawn(8, 8)] * 9, 1.0, "at most 8"),
    ],
)
def test_frames_that_are_no_video_are_refused(frames, fps, message):
    with pytest.raises(RequestError, match=message):
        process_video(frames, len(frames), fps, pixel_settings("video", max_frames=8))


def test_frames_of_a_rate_beyond_floats_are_seen_at_once():
    assert process_video([drawn(64, 64)] * 2, 2, 10**400, pixel_settings("video")).timestamps == (0.0,)
