"""Tokens of a video are left out where its picture does not change."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.media.preprocess import kept_tokens, process_video
from tests.support.media_cases import drawn, pixel_settings


def video(*patches):
    """[temporal patches, tokens, 1] of one value per token."""
    return np.array(patches, dtype=np.uint8)[:, :, None]


def kept(pixels, rate):
    return [each.tolist() for each in kept_tokens(pixels, rate)]


def test_what_does_not_change_is_left_out_first():
    pixels = video([9, 9, 9, 9], [9, 200, 9, 9], [9, 200, 9, 30])
    assert kept(pixels, 0.5) == [[0, 1, 2, 3], [1], [3]]


def test_a_change_is_counted_in_either_direction():
    pixels = video([100, 100, 100], [255, 0, 90])
    assert kept(pixels, 0.17) == [[0, 1, 2], [0, 1]]
    assert kept(pixels, 0.34) == [[0, 1, 2], [0]]


def test_the_first_temporal_patch_stays_whole_whatever_the_rate():
    assert kept(video([1, 2], [3, 4], [5, 6]), 0.99) == [[0, 1], [], []]


def test_of_equals_the_earlier_is_kept():
    assert kept(video([0, 0, 0], [5, 5, 5], [10, 10, 10]), 0.5) == [[0, 1, 2], [0, 1], []]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.29, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize(("patches", "tokens"), [(1, 5), (2, 5), (10, 10), (7, 3)])
def test_so_many_are_kept_as_was_promised(patches, tokens, rate):
    pixels = np.random.default_rng(0).integers(0, 255, (patches, tokens, 4), dtype=np.uint8)
    total = patches * tokens
    expected = max(tokens, math.ceil(total * (1 - Fraction(str(rate)))))
    assert sum(map(len, kept(pixels, rate))) == expected


@given(
    patches=st.integers(1, 5),
    tokens=st.integers(1, 6),
    low=st.floats(0, 0.99),
    more=st.floats(0, 0.99),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_higher_rate_keeps_a_part_of_what_a_lower_one_keeps(patches, tokens, low, more, seed):
    pixels = np.random.default_rng(seed).integers(0, 3, (patches, tokens, 2), dtype=np.uint8)
    low, high = sorted((low, more))
    for fewer, most in zip(kept(pixels, high), kept(pixels, low), strict=True):
        assert set(fewer) <= set(most)
        assert fewer == sorted(set(fewer))
        assert all(0 <= token < tokens for token in fewer)


def test_tokens_are_numbered_row_by_row_as_they_stand_in_the_prompt():
    own = pixel_settings("video", min_pixels=1, max_pixels=10**7)
    still = drawn(64, 96)
    changed = still.copy()
    changed.paste((0, 0, 0), (64, 32, 96, 64))  # the last of three columns, the second row
    video = process_video([still, still, changed, changed], 4, 2.0, own, pruning_rate=0.4)
    first, second = video.items
    assert first.kept is None
    assert first.num_tokens == 6
    assert second.num_tokens == 2
    assert 5 in second.kept
    assert len(second.patches) == 24
    assert second.digest != process_video([still, still, changed, changed], 4, 2.0, own).items[1].digest
