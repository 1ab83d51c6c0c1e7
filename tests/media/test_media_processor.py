"""Images become the patches that transformers' processor with Pillow makes of them; and settings of processors."""

from __future__ import annotations

import ast
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ostinato.engine.migration.wire_format import ByteParts, export_media, import_media
from ostinato.errors import ModelError, RequestError
from ostinato.media.media_item import MediaItem, rope_positions
from ostinato.media.media_prompt import MediaPlacement, MediaPrompt
from ostinato.media.preprocess import process_crops, process_image, process_slices, process_tiles, process_video
from ostinato.media.processor_config import CORNER, CropSettings, SliceSettings, load_media_settings
from ostinato.media.resize import crop_grid, image_size, resize, slice_grid, slice_size, tile_grid
from ostinato.runner.image_encoder import patch_positions
from tests.support.gemma4_processors import UNIFIED
from tests.support.media_cases import (
    EMBEDDED,
    FITTED,
    FLOATS,
    HALVES,
    SLICED,
    drawn,
    fitted_settings,
    float_settings,
    pixel_settings,
    sliced_settings,
    tiled_settings,
    vision_spec,
)

SIDES = st.integers(1, 700)


def theirs(image, own):
    """What transformers' processor with Pillow gives: patches and the grid."""
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": own.min_pixels, "longest_edge": own.max_pixels},
        resample=own.resample,
        rescale_factor=own.scale,
        image_mean=list(own.mean),
        image_std=list(own.std),
        patch_size=own.patch_size,
        temporal_patch_size=own.temporal_patch_size,
        merge_size=own.merge_size,
    )
    out = processor(images=[image], return_tensors="np")
    return out["pixel_values"], tuple(int(n) for n in out["image_grid_thw"][0])


def assert_equals_theirs(image, own):
    item = process_image(image, own)
    patches, (frames, *grid) = theirs(image, own)
    assert (frames, tuple(grid)) == (1, item.grid)
    assert item.num_tokens == grid[0] * grid[1] // own.merge_size**2
    made = np.asarray(item.patches)
    assert made.dtype == np.float32
    assert len(made) == len(item.patches)
    np.testing.assert_array_equal(made, patches)


@pytest.mark.parametrize(
    ("height", "width"),
    [(64, 64), (64, 96), (1, 1), (1, 200), (200, 1), (33, 31), (257, 255), (480, 640), (1080, 1920), (16, 3000)],
)
def test_an_image_of_any_size_has_the_patches_of_transformers(height, width):
    assert_equals_theirs(drawn(height, width), pixel_settings())


@given(height=SIDES, width=SIDES, low=st.integers(1, 40), high=st.integers(40, 400), factors=st.sampled_from([1, 2, 3]))
@settings(max_examples=40, deadline=None)
def test_any_size_and_limits_give_the_patches_of_transformers(height, width, low, high, factors):
    if max(height, width) / min(height, width) > 200:
        return
    own = pixel_settings(min_pixels=low * 256, max_pixels=high * 256, merge_size=factors)
    assert_equals_theirs(drawn(height, width, seed=height), own)


@pytest.mark.parametrize("resample", [0, 1, 2, 3])
def test_other_filters_means_and_scales_give_the_patches_of_transformers(resample):
    own = pixel_settings(
        resample=resample,
        scale=1 / 127.5,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        patch_size=14,
        temporal_patch_size=3,
    )
    assert_equals_theirs(drawn(150, 222), own)


def test_real_limits_give_the_sizes_of_transformers():
    own = pixel_settings(min_pixels=65536, max_pixels=16777216)
    assert image_size(100, 100, own) == (256, 256)
    assert image_size(1080, 1920, own) == (1088, 1920)
    assert image_size(6000, 8000, own) == (3520, 4704)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (37, 61), (1, 90), (200, 20), (12, 12)])
def test_an_image_of_a_model_of_one_size_has_the_pixels_of_transformers(height, width):
    """Gemma 3's processor with torchvision, by torch alone; that with Pillow rounds them by at most one step."""
    image, own = (
        drawn(height, width),
        pixel_settings(side=24, patch_size=4, temporal_patch_size=1, resample=2, mean=HALVES, std=HALVES),
    )
    item = process_image(image, own)
    assert (item.grid, item.num_tokens) == ((6, 6), 9)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = F.interpolate(pixels, (24, 24), mode="bilinear", antialias=True, align_corners=False)[0]
    mean, std = (torch.tensor(values)[:, None, None] * (1 / own.scale) for values in (own.mean, own.std))
    expected = ((resized.float() - mean) / std).numpy()
    made = np.empty_like(expected)
    for (row, column), patch in zip(patch_positions(item.grid, 2), np.asarray(item.patches), strict=True):
        made[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = patch.reshape(3, 4, 4)
    np.testing.assert_array_equal(made, expected)
    of_pillow = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})(images=[image], return_tensors="np")
    np.testing.assert_allclose(made, of_pillow["pixel_values"][0], atol=1.01 * 2 / 255)


@pytest.mark.parametrize(
    ("height", "width"), [(480, 640), (96, 48), (1, 1), (37, 700), (3, 599), (700, 5), (1000, 1000), (400, 300)]
)
@pytest.mark.parametrize("most", [70, 280])
def test_an_image_of_as_many_tokens_as_fit_has_the_pixels_of_transformers(height, width, most):
    """Gemma 4's processor with torchvision, by torch alone; the model's code doubles pixels and subtracts 1."""
    image, own = drawn(height, width), fitted_settings(most)
    item = process_image(image, own)
    size = get_aspect_ratio_preserving_size(height, width, 16, 9 * most, 3)
    assert image_size(height, width, own) == size
    assert (item.grid, item.num_tokens) == ((size[0] // 16, size[1] // 16), size[0] * size[1] // 48**2)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = F.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)[0]
    cut = (2 * (resized * (1 / 255) - 0.5)).unfold(1, 16, 16).unfold(2, 16, 16)
    expected = cut.permute(1, 2, 3, 4, 0).flatten(0, 1).flatten(1).numpy()
    rows, columns = patch_positions(item.grid, 3).T
    np.testing.assert_array_equal(item.patches, expected[rows * item.grid[1] + columns])


@given(height=SIDES, width=SIDES, most=st.sampled_from([70, 140, 560, 1120]))
@settings(deadline=None)
def test_an_image_of_any_size_becomes_as_large_as_in_transformers(height, width, most):
    if max(height, width) / min(height, width) > 200:
        return
    theirs = get_aspect_ratio_preserving_size(height, width, 16, 9 * most, 3)
    assert image_size(height, width, fitted_settings(most)) == theirs


def test_settings_of_images_of_as_many_tokens_as_fit_are_read(tmp_path):
    vision = vision_spec(**FITTED)
    assert load_media_settings(tmp_path, vision).image == fitted_settings(280)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 0}))
    assert load_media_settings(tmp_path, vision).image.resample == CORNER
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps({"image_processor": {"max_soft_tokens": 1120, "do_normalize": False, "size": None}}))
    assert load_media_settings(tmp_path, vision).image == fitted_settings(1120)
    for changes, words in (
        ({"max_soft_tokens": 300}, "max_soft_tokens = 300, which should be one of 70, 140, 280, 560, 1120"),
        ({"do_normalize": True}, "do_normalize = True, which should be false; the encoder expects pixels from 0 to 1"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size = 2, which should be 3"),
    ):
        file.write_text(json.dumps({"image_processor": changes}))
        with pytest.raises(ModelError, match=words):
            load_media_settings(tmp_path, vision)


def test_settings_of_frames_of_as_many_tokens_as_fit_are_read(tmp_path):
    """They are more than images' in number, and fewer in tokens; transformers normalises them to what they are."""
    with_videos = FITTED | {"video_token_id": 9}
    alone = replace(fitted_settings(70), kind="video", divides=True, max_frames=32)
    assert load_media_settings(tmp_path, vision_spec(**with_videos)).video == alone
    file = tmp_path / "processor_config.json"
    values = {"max_soft_tokens": 140, "num_frames": 8, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    file.write_text(json.dumps({"video_processor": values | {"do_sample_frames": True}}))
    found = load_media_settings(tmp_path, vision_spec(**with_videos)).video
    assert found == replace(fitted_settings(140), kind="video", divides=True, max_frames=8)
    file.write_text(json.dumps({"video_processor": {"do_normalize": False}}))
    assert load_media_settings(tmp_path, vision_spec(**with_videos)).video == replace(alone, divides=False)
    file.write_text(json.dumps({"video_processor": {"image_std": [0.5] * 3}}))
    with pytest.raises(ModelError, match="do_normalize = None, which should be false; the encoder expects pixels"):
        load_media_settings(tmp_path, vision_spec(**with_videos))
    assert load_media_settings(tmp_path, vision_spec(**FITTED)).video == replace(fitted_settings(280), kind="video")


def test_a_token_without_an_encoder_has_the_pixels_of_its_patches(tmp_path):
    """Of whatever sizes the processor makes it; in the model's order, from 0 to 1."""
    vision, file = vision_spec(**EMBEDDED), tmp_path / "processor_config.json"
    own = load_media_settings(tmp_path, vision).image
    assert (own.mean, own.std, own.max_side) == ((0.0,) * 3, (1.0,) * 3, 1120 * 48)
    for patch, pooled in ((16, 3), (12, 4), (48, 1)):
        file.write_text(json.dumps({"image_processor": {"patch_size": patch, "pooling_kernel_size": pooled}}))
        assert load_media_settings(tmp_path, vision).image == own
    file.write_text(json.dumps({"image_processor": {"patch_size": 12}}))
    with pytest.raises(ModelError, match="patch_size 12 times pooling_kernel_size 3, which should be 48"):
        load_media_settings(tmp_path, vision)
    image = drawn(300, 517)
    item, size = process_image(image, own), get_aspect_ratio_preserving_size(300, 517, 16, 9 * 280, 3)
    assert (item.grid, item.num_tokens) == ((size[0] // 48, size[1] // 48), size[0] * size[1] // 48**2)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = F.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)[0] * (1 / 255)
    cut = resized.unfold(1, 16, 16).unfold(2, 16, 16).permute(1, 2, 3, 4, 0)
    places = torch.stack(torch.meshgrid(*(torch.arange(side // 16) for side in size[::-1]), indexing="xy"), dim=-1)
    merged, positions = UNIFIED.patches_merge(
        cut.reshape(1, -1, 16 * 16 * 3), places.reshape(1, -1, 2), item.num_tokens
    )
    np.testing.assert_array_equal(item.patches, merged[0].numpy())
    np.testing.assert_array_equal(patch_positions(item.grid, 1)[:, ::-1], positions[0].numpy())


def test_an_image_with_a_side_beyond_the_encoders_positions_is_refused():
    own = replace(fitted_settings(280), max_side=1600)
    assert image_size(100, 400, own) == (384, 1584)
    with pytest.raises(RequestError, match="1776x336, and the encoder has positions for 1600 along a side"):
        image_size(100, 500, own)


@cache
def theirs_unimported(name: str) -> Callable[..., Any]:
    """A function of transformers' processor for Nemotron 3 Nano Omni, whose module imports torchvision."""
    spec = find_spec("transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni")
    assert spec is not None
    assert spec.origin is not None
    [node] = [each for each in ast.parse(Path(spec.origin).read_text()).body if getattr(each, "name", None) == name]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([node], []), spec.origin, "exec"), names)
    return names[name]


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize(
    ("height", "width"), [(480, 640), (96, 48), (1, 1), (37, 700), (3, 599), (700, 5), (512, 512), (1000, 1030)]
)
def test_an_image_in_floats_has_the_pixels_of_transformers(height, width, resample):
    """Nemotron 3 Nano Omni's processor, by torch alone: equal to the bit if it is not resized."""
    image, own = drawn(height, width), replace(float_settings(), resample=resample)
    item = process_image(image, own)
    rows, columns = theirs_unimported("get_patch_grid_size")(height, width, 16, 2, 1024, 13312)
    assert (item.grid, item.num_tokens) == ((rows, columns), rows * columns // 4)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    if is_resized := (height, width) != (16 * rows, 16 * columns):
        mode = {2: "bilinear", 3: "bicubic"}[resample]
        pixels = F.interpolate(pixels, (16 * rows, 16 * columns), mode=mode, antialias=True, align_corners=False)
    mean, std = (torch.tensor(values)[:, None, None] * (1 / own.scale) for values in (own.mean, own.std))
    expected = theirs_unimported("convert_image_to_patches")((pixels - mean) / std, 16)[0].numpy()
    of_rows, of_columns = patch_positions(item.grid, 2).T
    assert np.asarray(item.patches).dtype == np.float32
    assert_allclose = partial(np.testing.assert_allclose, rtol=0, atol=1e-5 if is_resized else 0)
    assert_allclose(item.patches, expected[of_rows * columns + of_columns])


@given(height=SIDES, width=SIDES, least=st.integers(4, 300), more=st.integers(0, 900))
@settings(deadline=None)
def test_an_image_of_any_size_has_the_grid_of_transformers(height, width, least, more):
    if max(height, width) / min(height, width) > 200:
        return
    try:
        grid = theirs_unimported("get_patch_grid_size")(height, width, 16, 2, least, least + more)
    except ZeroDivisionError:  # of a grid without rows or columns, which theirs cannot enlarge
        return
    if 0 not in grid:
        assert image_size(height, width, float_settings(least, least + more)) == (16 * grid[0], 16 * grid[1])


@pytest.mark.parametrize("own", [float_settings(), sliced_settings()], ids=["floats", "slices"])
def test_an_image_moves_to_another_engine_as_it_is(own):
    """Its pixels arrive in their type, and its digest is checked."""
    image = drawn(500, 300)
    items = (process_image(image, own),) if own.slices is None else process_slices(image, own).items
    ends = [10 * (i + 1) for i in range(len(items))]
    spans = tuple(
        MediaPlacement(end - 9, end, replace(item, num_tokens=9)) for end, item in zip(ends, items, strict=True)
    )
    media, parts = MediaPrompt([0] * 99, spans, rope_positions(99, [], 2)), ByteParts()
    moved = import_media(export_media(media, parts), media.token_ids, parts.parts)
    for mine, theirs in zip(items, moved.spans, strict=True):
        assert (theirs.item.digest, theirs.item.grid) == (mine.digest, mine.grid)
        np.testing.assert_array_equal(theirs.item.patches, mine.patches)


def test_settings_of_images_in_floats_are_read(tmp_path):
    vision = vision_spec(**FLOATS)
    own = load_media_settings(tmp_path, vision).image
    assert own == float_settings()
    assert own.of_images(99) == own
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"norm_mean": [0.5] * 3, "norm_std": [0.25] * 3, "max_num_patches": 0}))
    own = load_media_settings(tmp_path, vision).image
    assert (own.mean, own.std, own.max_pixels, own.most_pixels) == ((0.5,) * 3, (0.25,) * 3, 256 * 4 * 16380, 0)
    assert own.of_images(100).max_pixels == 256 * 1024 * 100
    file.write_text(json.dumps({"norm_mean": [0.5] * 3, "image_mean": [0.25] * 3, "norm_std": None}))
    own = load_media_settings(tmp_path, vision).image
    assert (own.mean, own.std) == ((0.25,) * 3, float_settings().std)
    file.write_text(json.dumps({"max_model_len": 404, "min_num_patches": 900, "max_num_patches": 2000}))
    own = load_media_settings(tmp_path, vision).image
    assert [own.of_images(count).max_pixels // 256 for count in (1, 2, 3)] == [1600, 1800, 2000]
    for changes, words in (
        ({"downsample_ratio": 0.25}, "downsample_ratio = 0.25, which should be 0.5, as config.json has it"),
        ({"max_num_patches": -1}, "max_num_patches = -1, which should be a whole number of at least 1"),
        ({"patch_size": 14}, "patch_size = 14, which should be 16"),
    ):
        file.write_text(json.dumps(changes))
        with pytest.raises(ModelError, match=words):
            load_media_settings(tmp_path, vision)


@pytest.mark.parametrize("mode", ["4x", "16x"])
@pytest.mark.parametrize(
    ("height", "width"), [(100, 90), (1, 1), (224, 224), (225, 224), (500, 300), (300, 1000), (900, 900), (3, 400)]
)
def test_an_image_and_its_slices_have_the_pixels_of_transformers(height, width, mode):
    """MiniCPM-V 4.7's processor with torchvision, by torch alone; its grids and sizes are those of its own with Pillow.

    Its patches lie row by row; of ours those of a window, two by two, are next to each other.
    """
    image, own = drawn(height, width), sliced_settings(4 if mode == "16x" else 2)
    made = process_slices(image, own)
    theirs = MiniCPMV4_6ImageProcessorPil(scale_resolution=224, patch_size=14, downsample_mode=mode)
    out = theirs(images=[image], return_tensors="pt")
    grid = tuple(out["grids"][0])
    assert made.grid == (grid if max(grid) else (1, 1))
    assert [item.grid for item in made.items] == [tuple(size) for size in out["target_sizes"].tolist()]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    whole, *slices = (tuple(14 * side for side in item.grid) for item in made.items)

    def resized(rows, columns):
        return F.interpolate(pixels, (rows, columns), mode="bicubic", antialias=True, align_corners=False)[0]

    pieces = [resized(*whole)]
    if slices:
        [(rows, columns)] = set(slices)
        large = resized(grid[0] * rows, grid[1] * columns).unfold(1, rows, rows).unfold(2, columns, columns)
        pieces += list(large.permute(1, 2, 0, 3, 4).flatten(0, 1))
    mean, std = (torch.tensor(values)[:, None, None] * (1 / own.scale) for values in (own.mean, own.std))
    for item, piece in zip(made.items, pieces, strict=True):
        cut = ((piece.float() - mean) / std).unfold(1, 14, 14).unfold(2, 14, 14)
        expected = cut.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1).numpy()
        rows, columns = patch_positions(item.grid, own.merge_size, own.has_windows).T
        np.testing.assert_array_equal(item.patches, expected[rows * item.grid[1] + columns])


@given(height=SIDES, width=SIDES, side=st.sampled_from([56, 112, 224]), most=st.integers(1, 12))
@settings(deadline=None)
def test_an_image_of_any_size_has_the_slices_of_transformers(height, width, side, most):
    if max(height, width) / min(height, width) > 200:
        return
    own = sliced_settings(4, min_pixels=side**2, max_pixels=side**2, slices=SliceSettings(most, True))
    theirs = MiniCPMV4_6ImageProcessorPil()
    grid = theirs.get_sliced_grid((height, width), most, side)
    assert slice_grid(height, width, own) == tuple(grid or (1, 1))
    expected = theirs.find_best_resize((height, width), side, 14, "16x", allow_upscale=grid is None)
    assert image_size(height, width, own) == expected
    if grid is not None:
        refined = theirs.get_refine_size((height, width), grid, side, 14, "16x", allow_upscale=True)
        rows, columns = slice_size(height, width, tuple(grid), own)
        assert (rows * grid[0], columns * grid[1]) == refined


def test_a_whole_image_is_another_item_with_slices_than_without():
    """Its positions are others, over the slices that follow it."""
    image = drawn(500, 300)
    with_slices = process_slices(image, sliced_settings())
    alone = process_slices(image, sliced_settings(slices=SliceSettings(1, True)))
    assert (len(with_slices.items), len(alone.items)) == (3, 1)
    np.testing.assert_array_equal(with_slices.items[0].patches, alone.items[0].patches)
    assert with_slices.items[0].digest != alone.items[0].digest


def test_settings_of_slices_are_read(tmp_path):
    vision = vision_spec(**SLICED)
    own = load_media_settings(tmp_path, vision).image
    assert own == sliced_settings(min_pixels=448**2, max_pixels=448**2)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"scale_resolution": 224, "slice_mode": False, "use_image_id": False}))
    assert load_media_settings(tmp_path, vision).image == sliced_settings(slices=SliceSettings(1, False))
    for changes, words in (
        ({"downsample_mode": "4x"}, "downsample_mode = '4x', which should be '16x', as config.json has it"),
        ({"scale_resolution": 40}, "scale_resolution = 40, which should be at least 56, the pixels of a token"),
        ({"max_slice_nums": 99}, "max_slice_nums = 99, which should be at most 64"),
        ({"patch_size": 16}, "patch_size = 16, which should be 14"),
    ):
        file.write_text(json.dumps(changes))
        with pytest.raises(ModelError, match=words):
            load_media_settings(tmp_path, vision)


LONG = [(300, 700), (700, 300), (517, 530), (256, 1500), (1500, 301), (255, 900), (1300, 256), (600, 720), (500, 501)]


@pytest.mark.parametrize(("height", "width"), LONG)
@pytest.mark.parametrize("ratio", [1.2, 1.0])
def test_crops_of_a_long_image_are_those_of_transformers(height, width, ratio):
    """Those of its processor with Pillow, each of which becomes an item like an image that is sent as it is."""
    own = pixel_settings(side=24, patch_size=4, temporal_patch_size=1, resample=2, crops=CropSettings(256, 4, ratio))
    image = drawn(height, width)
    pixels = np.asarray(image).transpose(2, 0, 1)
    theirs = Gemma3ImageProcessorPil().pan_and_scan(pixels, 256, 4, ratio)
    made = process_crops(image, own)
    items = [made] if isinstance(made, MediaItem) else list(made.items)
    expected = [process_image(Image.fromarray(each.transpose(1, 2, 0)), own) for each in [pixels, *theirs]]
    assert [item.digest for item in items] == [item.digest for item in expected]
    assert isinstance(made, MediaItem) or (made.has_crops and max(made.grid) == len(theirs))


@given(height=SIDES, width=SIDES, size=st.integers(8, 99), most=st.integers(1, 8), ratio=st.floats(1, 4))
@settings(deadline=None)
def test_an_image_of_any_size_has_as_many_crops_as_in_transformers(height, width, size, most, ratio):
    pixels = np.zeros((3, height, width), np.uint8)
    theirs = Gemma3ImageProcessorPil().pan_and_scan(pixels, size, most, ratio)
    rows, columns = crop_grid(height, width, CropSettings(size, most, ratio))
    assert rows * columns == len(theirs)


def test_a_processor_of_another_size_is_refused_and_crops_are_read(tmp_path):
    vision = vision_spec(image_side=24, patch_size=4, temporal_patch_size=1, video_token_id=None)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"size": {"height": 24, "width": 24}, "do_pan_and_scan": None, "resample": 2}))
    image = load_media_settings(tmp_path, vision).image
    assert (image.side, image.mean, image.resample) == (24, (0.5, 0.5, 0.5), 2)
    assert load_media_settings(tmp_path / "none", vision).image == image
    for changes, words in (
        ({"size": {"height": 32, "width": 24}}, "size = .* which should be height and width 24"),
        ({"size": {"height": 28, "width": 28}}, "size = .* which should be height and width 24"),
        ({"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 3}, "= 3, which should be at least .*, which is 4"),
        ({"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 0.9}, "a number of at least 1"),
    ):
        file.write_text(json.dumps(changes))
        with pytest.raises(ModelError, match=words):
            load_media_settings(tmp_path, vision)
    file.write_text(json.dumps({"size": {"height": 26, "width": 26}}))  # the encoder drops what is no whole patch
    odd, drawing = load_media_settings(tmp_path, vision).image, drawn(61, 47)
    resized = Image.fromarray(np.asarray(resize(np.asarray(drawing), 26, 26, 2))[:24, :24])
    np.testing.assert_array_equal(process_image(drawing, odd).patches, process_image(resized, image).patches)
    file.write_text(json.dumps({"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 6}))
    assert load_media_settings(tmp_path, vision).image == replace(image, crops=CropSettings(256, 6, 1.2))


SQUARE = {"image_side": 24, "patch_size": 4, "temporal_patch_size": 1, "video_token_id": None}
TILED = {"cuts_tiles": True, "is_naflex": True, "temporal_patch_size": 1, "video_token_id": None}


@pytest.mark.parametrize("kind", [{}, FITTED, EMBEDDED, FLOATS, SLICED, SQUARE, TILED])
def test_null_in_a_processor_means_what_its_absence_means(tmp_path, kind):
    """As in transformers, whose published files of Gemma 3 have several."""
    vision, processors = vision_spec(**kind), (Gemma3ImageProcessorPil, Qwen2VLImageProcessorPil)
    names = {name for each in (*processors, MiniCPMV4_6ImageProcessorPil) for name in each.valid_kwargs.__annotations__}
    names |= {
        "max_pixels_tolerance",
        "tile_size",
        "use_thumbnail",
        "downsample_ratio",
        "min_num_patches",
        "max_model_len",
    }
    assert {"do_convert_rgb", "do_normalize", "resample", "rescale_factor", "downsample_mode"} <= names
    absent = load_media_settings(tmp_path, vision)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict.fromkeys(names)))
    assert load_media_settings(tmp_path, vision) == absent


def theirs_in_tiles(image, own, grid, whole):
    """What transformers' processor for LFM2-VL gives with torchvision, by torch alone: patches row by row."""
    pixels, (rows, columns), side = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], grid, own.tiles.size

    def resized(*size):
        return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)[0]

    pieces = [resized(*whole)]
    if rows * columns > 1:
        large = resized(rows * side, columns * side).unfold(1, side, side).unfold(2, side, side)
        pieces = [*large.permute(1, 2, 0, 3, 4).flatten(0, 1), *pieces]
    mean, std = (torch.tensor(values)[:, None, None] * (1 / own.scale) for values in (own.mean, own.std))
    for piece in pieces:
        cut = ((piece.float() - mean) / std).unfold(1, 16, 16).unfold(2, 16, 16)
        yield cut.permute(1, 2, 3, 4, 0).flatten(0, 1).flatten(1).numpy()


@pytest.mark.parametrize(
    ("height", "width", "grid", "whole"),
    [
        (600, 900, (2, 3), (26, 38)),
        (256, 256, (1, 1), (16, 16)),
        (20, 900, (1, 1), (4, 108)),
        (720, 720, (1, 1), (32, 32)),
        (768, 768, (2, 2), (32, 32)),
        (3000, 500, (6, 1), (78, 12)),
    ],
)
def test_a_large_image_is_cut_into_the_tiles_of_transformers(height, width, grid, whole):
    """Rows and columns of tiles, and of the thumbnail's patches, are those that transformers 5.23 gives."""
    own, image = tiled_settings(), drawn(height, width)
    made = process_tiles(image, own)
    assert (made.grid, made.items[-1].grid) == (grid, whole)
    sides = (16 * whole[0], 16 * whole[1])
    for item, expected in zip(made.items, theirs_in_tiles(image, own, grid, sides), strict=True):
        rows, columns = patch_positions(item.grid, own.merge_size).T
        np.testing.assert_array_equal(item.patches, expected[rows * item.grid[1] + columns])


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [(1080, 1920, (2, 4)), (1920, 1080, (4, 2)), (400, 2400, (1, 6)), (800, 1000, (2, 3)), (2000, 2000, (3, 3))],
)
def test_the_grid_of_tiles_is_that_of_transformers(height, width, grid):
    assert tile_grid(height, width, tiled_settings()) == grid


def test_patches_lie_in_the_order_of_merging():
    own = pixel_settings(min_pixels=1, scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3, resample=0)
    pixels = np.zeros((64, 64, 3), np.uint8)
    for row in range(4):
        for column in range(4):
            pixels[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] = 10 * row + column
    item = process_image(Image.fromarray(pixels), own)
    order = [0, 1, 10, 11, 2, 3, 12, 13, 20, 21, 30, 31, 22, 23, 32, 33]
    assert np.asarray(item.patches)[:, 0].tolist() == order


@pytest.mark.parametrize(("height", "width"), [(1, 10000), (10000, 1), (1, 201)])
def test_an_image_that_is_too_narrow_is_refused(height, width):
    with pytest.raises(RequestError, match="at most 200 times"):
        process_image(Image.new("RGB", (width, height)), pixel_settings())


def test_an_image_without_pixels_is_refused():
    with pytest.raises(RequestError, match="is empty"):
        process_image(Image.new("RGB", (0, 10)), pixel_settings())


def test_a_digest_tells_apart_pixels_grids_and_settings():
    own = pixel_settings()
    flat = Image.new("RGB", (128, 64), (9, 9, 9))
    items = [
        process_image(flat, own),
        process_image(flat.rotate(90, expand=True), own),
        process_image(Image.new("RGB", (128, 64), (9, 9, 8)), own),
        process_image(flat, pixel_settings(mean=(0.4, 0.5, 0.5))),
        process_video([flat, flat], 2, 1.0, pixel_settings("video")).items[0],
    ]
    assert len({item.digest for item in items}) == len(items)
    assert process_image(flat.copy(), pixel_settings(max_pixels=60000)).digest == items[0].digest


def checkpoint(directory, **files):
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_settings_that_a_checkpoint_leaves_out_are_those_of_transformers(tmp_path):
    found = load_media_settings(tmp_path, vision_spec())
    theirs = Qwen2VLImageProcessorPil()
    assert found.image.mean == tuple(theirs.image_mean)
    assert found.image.std == tuple(theirs.image_std)
    assert (found.image.min_pixels, found.image.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert (found.video.min_pixels, found.video.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert found.video.mean == found.video.std == HALVES
    assert not found.video.cap_pixels_per_frame


def test_settings_are_read_from_either_form_of_files(tmp_path):
    image = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5, 0.5, 0.25], "resample": 2}
    video = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "max_frames": 12}
    old = checkpoint(tmp_path, preprocessor_config=image, video_preprocessor_config=video)
    found = load_media_settings(old, vision_spec())
    assert (found.image.min_pixels, found.image.max_pixels, found.image.resample) == (65536, 16777216, 2)
    assert found.image.mean == (0.5, 0.5, 0.25)
    assert (found.video.min_pixels, found.video.max_pixels, found.video.max_frames) == (4096, 25165824, 12)
    new = tmp_path / "new"
    new.mkdir()
    checkpoint(new, processor_config={"image_processor": image, "video_processor": video})
    assert load_media_settings(new, vision_spec()) == found


def test_limits_by_their_old_names_win(tmp_path):
    files = {"min_pixels": 100, "max_pixels": 200, "size": {"shortest_edge": 1, "longest_edge": 2}}
    found = load_media_settings(checkpoint(tmp_path, preprocessor_config=files), vision_spec())
    assert (found.image.min_pixels, found.image.max_pixels) == (100, 200)
    assert (found.video.min_pixels, found.video.max_pixels) == (1, 2)  # whose processor has no other names


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 14}, "patch_size = 14, which should be 16"),
        ({"do_resize": False}, "do_resize = False, which should be true"),
        ({"resample": 9}, "resample = 9, which should be one of"),
        ({"resample": 4}, r"resample = 4, which should be one of 0 \(nearest\), 1 .*, 3 \(bicubic\)$"),
        ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "cannot both hold"),
        ({"size": 3}, "should be of the type dict"),
        ({"size": {"height": 224, "width": 224}}, "should be with shortest_edge"),
        ({"size": {"shortest_edge": 10}}, "should be with longest_edge"),
        ({"max_pixels": "many"}, "a whole number"),
        ({"image_mean": [0.5]}, "should be 3 numbers"),
        ({"image_mean": [0.5, 0.5, float("nan")]}, "should be 3 numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "should be 3 numbers above 0"),
        ({"image_std": [0.5, 10**400, 0.5]}, "should be 3 numbers above 0"),
        ({"rescale_factor": 0}, "a number above 0"),
        ({"rescale_factor": float("inf")}, "a number above 0"),
    ],
)
def test_settings_that_cannot_be_followed_name_the_file(tmp_path, values, message):
    with pytest.raises(ModelError, match=message) as error:
        load_media_settings(checkpoint(tmp_path, preprocessor_config=values), vision_spec())
    assert "preprocessor_config.json" in error.value.message


TILED = {"cuts_tiles": True, "is_naflex": True, "temporal_patch_size": 1}


def test_settings_of_tiles_are_read(tmp_path):
    assert load_media_settings(tmp_path, vision_spec(**TILED)).image == tiled_settings()
    values = {"do_image_splitting": False, "max_image_tokens": 100, "image_std": [0.5, 0.5, 0.25]}
    found = load_media_settings(checkpoint(tmp_path, preprocessor_config=values), vision_spec(**TILED)).image
    assert found == tiled_settings(tiles=None, max_pixels=100 * 32**2, std=(0.5, 0.5, 0.25))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoder_patch_size": 14}, "encoder_patch_size = 14, which should be 16"),
        ({"downsample_factor": 3}, "downsample_factor = 3, which should be 2"),
        ({"tile_size": 500}, "multiples of 32"),
        ({"min_image_tokens": 300}, "images of 300 to 256 tokens"),
        ({"max_tiles": 1}, "max_tiles = 1, which should be from min_tiles, which is 2, to 64"),
        ({"max_pixels_tolerance": "much"}, "a number"),
        ({"resample": 4}, "resample = 4, which should be one of"),
    ],
)
def test_settings_of_tiles_that_cannot_be_followed_name_the_file(tmp_path, values, message):
    with pytest.raises(ModelError, match=message) as error:
        load_media_settings(checkpoint(tmp_path, preprocessor_config=values), vision_spec(**TILED))
    assert "preprocessor_config.json" in error.value.message


def test_a_request_that_waits_keeps_pixels_and_not_patches():
    item = process_image(drawn(256, 256), pixel_settings())
    assert len(pickle.dumps(item)) < np.asarray(item.patches).nbytes / 7
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(item)).patches, item.patches)
