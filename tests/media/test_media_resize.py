"""Frames are resized as torch resizes uint8, to the bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.media.processor_config import CORNER
from ostinato.media.resize import BICUBIC, BILINEAR, LANCZOS, NEAREST, resize

MODES = {CORNER: "nearest", NEAREST: "nearest-exact", LANCZOS: "lanczos", BILINEAR: "bilinear", BICUBIC: "bicubic"}


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Noise, or with an odd seed black and white alone, where sums leave the range of a pixel most often."""
    rng = np.random.default_rng([height, width, seed])
    if seed % 2:
        return rng.integers(0, 2, (height, width, 3), dtype=np.uint8) * np.uint8(255)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_torch(image: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    kwargs = {} if resample in (CORNER, NEAREST) else {"antialias": True, "align_corners": False}
    planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()[None]
    return F.interpolate(planes, (height, width), mode=MODES[resample], **kwargs)[0].permute(1, 2, 0).numpy()


@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    new_size=st.tuples(st.integers(2, 300), st.integers(2, 300)),
    resample=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_any_size_becomes_any_other_as_by_torch(size, new_size, resample, seed):
    image = pixels(*size, seed)
    np.testing.assert_array_equal(resize(image, *new_size, resample), by_torch(image, *new_size, resample))


@pytest.mark.parametrize(
    ("size", "new_size"),
    [
        ((720, 1280), (352, 640)),
        ((480, 640), (736, 992)),
        ((64, 64), (192, 192)),
        ((96, 100), (96, 64)),
        ((100, 96), (64, 96)),
        ((1, 1), (64, 64)),
        ((3, 4000), (32, 32)),
        ((20000, 2), (32, 32)),
    ],
)
def test_sizes_of_videos_and_odd_ones_become_what_torch_makes_of_them(size, new_size):
    image = pixels(*size, seed=1)
    np.testing.assert_array_equal(resize(image, *new_size, BICUBIC), by_torch(image, *new_size, BICUBIC))


@given(st.integers(1, 5000), st.integers(2, 5000))
@settings(max_examples=200, deadline=None)
def test_the_nearest_pixel_is_the_one_that_torch_finds(size, new_size):
    image = np.arange(3 * size, dtype=np.int64).reshape(1, size, 3).astype(np.uint8)
    for place in (NEAREST, CORNER):
        np.testing.assert_array_equal(resize(image, 1, new_size, place), by_torch(image, 1, new_size, place))


@pytest.mark.parametrize("resample", sorted(MODES))
def test_a_size_that_stays_leaves_pixels_as_they_are(resample):
    image = pixels(37, 51)
    np.testing.assert_array_equal(resize(image, 37, 51, resample), image)


def test_pixels_that_lie_apart_in_memory_are_resized_as_others():
    image = pixels(60, 80)
    apart = np.asfortranarray(image)
    np.testing.assert_array_equal(resize(apart, 33, 47, BICUBIC), resize(image, 33, 47, BICUBIC))


def test_frames_are_resized_without_torch():
    program = "import sys, ostinato.media.media_input; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
