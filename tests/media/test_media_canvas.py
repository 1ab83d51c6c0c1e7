"""Positions of tokens on the canvases of images are those of transformers' MiniCPM-V 4.7."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from ostinato.errors import RequestError
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import canvas_positions, media_prompt, placeholders
from ostinato.media.preprocess import TiledImage
from ostinato.plan.layer_specs import CanvasTokens, VisionSpec
from tests.support.media_cases import END, IMAGE, START, encode, sliced_settings, tokenizer, vision_spec

IMAGE_ID, IMAGE_START, IMAGE_END, SLICE_START, SLICE_END, NEWLINE = 90, 91, 92, 93, 94, 95
TOKENS = CanvasTokens(IMAGE_START, IMAGE_END, SLICE_START, SLICE_END, NEWLINE)
CONFIG = {
    "image_start_id": IMAGE_START,
    "image_end_id": IMAGE_END,
    "slice_start_id": SLICE_START,
    "slice_end_id": SLICE_END,
    "newline_id": NEWLINE,
    "downsample_mode": "16x",
}

Grid = tuple[int, int]
Picture = tuple[Grid, Grid, Grid]
"""Tokens of the whole image, rows and columns of slices, tokens of a slice."""


def item(grid: Grid, merge: int) -> MediaItem:
    rows, columns = grid
    return MediaItem(np.zeros((0, 1)), (rows * merge, columns * merge), rows * columns, "an image")


def prompt_of(parts: list[list[int] | Picture], merge: int) -> tuple[list[int], list[tuple[int, int, MediaItem]]]:
    """Token ids and spans of texts and pictures."""
    token_ids: list[int] = []
    spans: list[tuple[int, int, MediaItem]] = []

    def add(before: int, grid: Grid, behind: int) -> None:
        token_ids.append(before)
        spans.append((len(token_ids), len(token_ids) + grid[0] * grid[1], item(grid, merge)))
        token_ids.extend([IMAGE_ID] * (grid[0] * grid[1]) + [behind])

    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        whole, (rows, columns), of_slice = part
        add(IMAGE_START, whole, IMAGE_END)
        for row in range(rows):
            token_ids += [NEWLINE] if row else []
            for _ in range(columns):
                add(SLICE_START, of_slice, SLICE_END)
    return token_ids, spans


def theirs(token_ids: list[int], spans: list[tuple[int, int, MediaItem]], mode: str) -> tuple[np.ndarray, int]:
    model = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(**(CONFIG | {"downsample_mode": mode}))
    ids = torch.tensor([token_ids])
    sizes = torch.tensor([span[2].grid for span in spans]) if spans else None
    positions, delta = model.get_rope_index(ids, (ids == IMAGE_ID).int(), target_sizes=sizes)
    return positions[:, 0].T.numpy(), int(delta)


GRIDS = st.tuples(st.integers(1, 9), st.integers(1, 9))
TEXTS = st.lists(st.sampled_from([1, 2, 3, NEWLINE, NEWLINE, IMAGE_END, SLICE_END]), max_size=4)
PICTURES = st.tuples(GRIDS, st.sampled_from([(0, 0), (1, 2), (2, 1), (2, 3), (3, 3), (1, 5), (4, 1)]), GRIDS)


@given(parts=st.lists(st.one_of(TEXTS, PICTURES), max_size=6), mode=st.sampled_from(["4x", "16x"]))
@settings(max_examples=200, deadline=None)
def test_any_prompt_has_the_positions_of_transformers(parts: list[list[int] | Picture], mode: str) -> None:
    merge = 2 if mode == "4x" else 4
    token_ids, spans = prompt_of([[5], *parts], merge)
    found = canvas_positions(token_ids, spans, merge, TOKENS)
    positions, delta = theirs(token_ids, spans, mode)
    np.testing.assert_array_equal(found.prompt, positions)
    assert found.delta == delta


def test_a_prompt_without_tokens_has_no_positions() -> None:
    found = canvas_positions([], [], 4, TOKENS)
    assert (found.prompt.shape, found.delta) == ((0, 3), 0)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_an_image_and_its_slices_have_the_text_of_transformers_processor(is_numbered: bool) -> None:
    """Numbers count the images of a conversation; a newline ends each row of slices but the last."""
    own = tokenizer()
    ids = [own.token_id(text) for text in (START, END, "<|im_start|>", "<|im_end|>")]
    assert None not in ids
    canvas = CanvasTokens(*map(int, ids), newline=encode("\n")[0])  # type: ignore[arg-type]
    fields = {"places": "enclosed", "video_token_id": None, "canvas": canvas, "merge_size": 4}
    vision: VisionSpec = vision_spec(**fields)
    pixels = sliced_settings()
    assert pixels.slices is not None
    if not is_numbered:
        pixels = sliced_settings(slices=type(pixels.slices)(9, False))
    texts = placeholders(own.token_text, encode, vision, pixels)
    alone = TiledImage((item((1, 2), 4),), (1, 1), is_sliced=True)
    cut = TiledImage((item((1, 2), 4), *[item((1, 1), 4)] * 6), (2, 3), is_sliced=True)
    found = media_prompt(f"a{IMAGE}b{IMAGE}", [alone, cut], texts, encode, vision)
    numbers = [f"<image_id>{number}</image_id>" if is_numbered else "" for number in (0, 1)]
    row = f"<|im_start|>{IMAGE}<|im_end|>" * 3
    whole = f"{START}{IMAGE * 2}{END}"
    assert found.token_ids == encode(f"a{numbers[0]}{whole}b{numbers[1]}{whole}{row}\n{row}")
    assert len(found.spans) == 8
    expected = canvas_positions(found.token_ids, found.spans, 4, canvas)
    np.testing.assert_array_equal(found.rope.prompt, expected.prompt)
    with pytest.raises(RequestError, match="which stands for an image"):
        texts.check_absent(IMAGE)
