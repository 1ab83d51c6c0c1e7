"""Positions of tokens in a prompt whose images lie on canvases: a small whole image over its slices (MiniCPM-V 4.7)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ostinato.media.media_item import MediaItem, RopePositions
from ostinato.plan.layer_specs import CanvasTokens

Span = tuple[int, int, MediaItem]
"""Tokens `start` to `end - 1` of a prompt, which stand for an item."""
BETWEEN = 2
"""Tokens between neighbouring slices of a row: the end of one, the start of the next."""


@dataclass
class _Picture:
    """A whole image, the slices behind it, and the end of the markers behind these."""

    whole: Span
    slices: list[Span] = field(default_factory=list)
    end: int = 0

    @property
    def columns(self) -> int:
        """Slices of a row; more tokens than those between neighbours end the first row."""
        count = len(self.slices)
        gaps = (right[0] - left[1] for left, right in itertools.pairwise(self.slices))
        columns = next((i for i, gap in enumerate(gaps, 1) if gap > BETWEEN), count)
        return columns if columns and count % columns == 0 else count


def canvas_positions(
    token_ids: Sequence[int], spans: Sequence[Span], merge_size: int, tokens: CanvasTokens
) -> RopePositions:
    """Compute the positions of a prompt with images, in their order.

    A token of text is one step after its predecessor. All tokens of an image, its slices and the markers around them
    share a time, that of the canvas. Slices lie side by side on it, the whole image is stretched over them, and markers
    are at corners. The next token comes after the canvas's longer side. This is the rule of transformers' model.
    """
    positions = np.zeros((len(token_ids), 3), dtype=np.int64)
    position = index = 0
    for picture in _pictures(token_ids, spans, tokens):
        begin = picture.whole[0] - 1
        _in_a_line(positions, index, begin, position)
        # The marker before a picture counts among those behind the one before, if there is nothing else between them.
        position += max(begin - index, 0)
        position += 1 + _place(positions, picture, position, merge_size)
        index = picture.end
    _in_a_line(positions, index, len(token_ids), position)
    return RopePositions(positions, int(positions.max(initial=-1)) + 1 - len(token_ids))


def _pictures(token_ids: Sequence[int], spans: Sequence[Span], tokens: CanvasTokens) -> list[_Picture]:
    pictures: list[_Picture] = []
    for span in spans:
        if pictures and token_ids[span[0] - 1] == tokens.slice_start:
            pictures[-1].slices.append(span)
        else:
            pictures.append(_Picture(span))
        pictures[-1].end = span[1]
    for picture in pictures:
        while picture.end < len(token_ids) and token_ids[picture.end] in tokens.markers:
            picture.end += 1
    return pictures


def _in_a_line(positions: np.ndarray, begin: int, end: int, position: int) -> None:
    if end > begin:
        positions[begin:end] = np.arange(position, position + end - begin)[:, None]


def _place(positions: np.ndarray, picture: _Picture, origin: int, merge_size: int) -> int:
    """Write the positions of a picture's tokens, and return the longer side of its canvas."""
    (start, end, _), slices = picture.whole, picture.slices
    sizes = [(item.grid[0] // merge_size, item.grid[1] // merge_size) for _, _, item in (picture.whole, *slices)]
    height, width = canvas = sizes[0]
    columns = picture.columns
    if slices:
        height, width = sizes[1]
        canvas = height * (len(slices) // columns), width * columns
    positions[start - 1 : picture.end] = origin
    positions[start - 1, 1:] = max(origin - 1, 0)
    if end < picture.end:
        positions[end, 1:] = origin + np.array(canvas)
    rows_of_whole, columns_of_whole = (_stretched(*each) for each in zip(sizes[0], canvas, strict=True))
    _interior(positions, picture.whole, origin, rows_of_whole, columns_of_whole)
    for i, (span, (own_height, own_width)) in enumerate(zip(slices, sizes[1:], strict=True)):
        top, left = i // columns * height, i % columns * width
        positions[span[0] - 1, 1:] = origin + top, origin + left
        if span[1] < picture.end:
            positions[span[1], 1:] = origin + top + own_height - 1, origin + left + own_width - 1
        _interior(positions, span, origin, top + np.arange(own_height), left + np.arange(own_width))
        if i + 1 < len(slices) and slices[i + 1][0] - span[1] > BETWEEN:  # newlines, past the row's right edge
            bottom = origin + (i // columns + 1) * height - 1
            positions[span[1] + 1 : slices[i + 1][0] - 1, 1:] = bottom, origin + columns * width
    return max(canvas)


def _interior(positions: np.ndarray, span: Span, origin: int, rows: np.ndarray, columns: np.ndarray) -> None:
    start, end, _ = span
    positions[start:end, 1] = origin + np.repeat(rows, len(columns))
    positions[start:end, 2] = origin + np.tile(columns, len(rows))


def _stretched(count: int, length: int) -> np.ndarray:
    """Return `count` whole numbers from 0 to `length - 1` at nearly equal distances, rounded as by torch in float32."""
    step, steps = np.float32(length - 1) / np.float32(max(count - 1, 1)), np.arange(count, dtype=np.float32)
    last = np.float32(length - 1)
    places = np.where(np.arange(count) < count // 2, step * steps, last - step * (np.float32(count - 1) - steps))
    places = places if count > 1 else np.zeros(count, dtype=np.float32)
    return np.rint(places).astype(np.int64)
