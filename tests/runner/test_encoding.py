"""A step's images: encoded in groups that activations were planned for, and written to their cells alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.media.media_item import MediaItem
from ostinato.runner.image_encoder import ImageEncoder
from ostinato.scheduler.batch import MediaToEncode

ROWS, HIDDEN, PATCHES_PER_TOKEN = 2, 3, 4


class Encoder:
    """Gives number 100 * image + token, and remembers which images came together."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def run(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        self.groups.append([item.digest for item in items])
        return [
            (100.0 * int(item.digest) + torch.arange(len(item.patches) // PATCHES_PER_TOKEN))[:, None, None].expand(
                -1, ROWS, HIDDEN
            )
            for item in items
        ]


def image(digest: int, tokens: int, cells: Sequence[int], kept: list[int] | None = None) -> MediaToEncode:
    patches = np.zeros((tokens * PATCHES_PER_TOKEN, 1), dtype=np.float32)
    own = None if kept is None else np.array(kept)
    return MediaToEncode(str(digest), MediaItem(patches, (2, 2 * tokens), len(cells), str(digest), own), cells)


def encode(images: Sequence[MediaToEncode], most_tokens: int) -> tuple[list[float], list[list[str]]]:
    """What stands in the cells, -1 where nothing was written, and the groups."""
    encoder, cells = Encoder(), torch.full((12, ROWS, HIDDEN), -1.0)
    ImageEncoder(cast(EncoderGraphs, encoder), cells, most_tokens * PATCHES_PER_TOKEN).run(images)
    assert (cells == cells[:, :1, :1]).all()
    return cells[:, 0, 0].tolist(), encoder.groups


def test_each_token_of_an_image_goes_to_its_cell() -> None:
    cells, groups = encode([image(1, 3, (4, 2, 9)), image(2, 2, (1, 3))], 99)
    assert cells == [-1, 200, 101, 201, 100, -1, -1, -1, -1, 102, -1, -1]
    assert groups == [["1", "2"]]


def test_of_a_pruned_image_the_tokens_that_are_kept_have_cells() -> None:
    cells, _ = encode([image(1, 5, (7, 8), kept=[0, 3])], 99)
    assert cells[7:9] == [100, 103]
    assert cells[:7] + cells[9:] == [-1] * 10


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [["1"], ["2"], ["3"]]), (4, [["1", "2"], ["3"]]), (5, [["1", "2"], ["3"]]), (7, [["1", "2", "3"]])],
)
def test_no_more_images_are_encoded_together_than_activations_were_planned_for(
    most: int, expected: list[list[Any]]
) -> None:
    images = [image(1, 2, (1, 2)), image(2, 2, (3, 4)), image(3, 3, (5, 6, 7))]
    cells, groups = encode(images, most)
    assert groups == expected
    assert cells[1:8] == [100, 101, 200, 201, 300, 301, 302]
