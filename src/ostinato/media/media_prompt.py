"""The prompt of a conversation with images: its token ids, and the image and position of each placeholder.

Images of MiniCPM-V 4.7 lie on canvases: a small whole image over its slices.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ostinato.errors import ModelError, RequestError
from ostinato.kv_cache.prefix_index import MediaSpan
from ostinato.media.media_item import MediaItem, RopePositions, rope_positions
from ostinato.media.preprocess import TiledImage, Video
from ostinato.media.processor_config import PixelSettings
from ostinato.plan.layer_specs import CanvasTokens, VisionSpec

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


Encode = Callable[[str], list[int]]
"""Function from text, with special tokens written out, to token ids."""
AnyMedia = MediaItem | TiledImage | Video
VIDEO = "<|video|>"
"""Text of a video in the template of Gemma 4, of whose tokenizer it need not be a special token."""
IMAGE_NUMBER = "<image_id>{}</image_id>"
"""Text before an image, with its number (MiniCPM-V 4.7)."""
THUMBNAIL = "<|img_thumbnail|>"
"""Text before an image's thumbnail (LFM2-VL)."""
TokenText = Callable[[int], str | None]
"""Function from a token id to its text."""


class MediaPlacement(NamedTuple):
    """An item, and the tokens `start` to `end - 1` of a prompt that stand for it."""

    start: int
    end: int
    item: MediaItem


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt with images, ready for the engine."""

    token_ids: list[int]
    """Token ids of the prompt, with one token for each token of an item."""
    spans: tuple[MediaPlacement, ...]
    """Items by position. Items without tokens are left out."""
    rope: RopePositions

    def in_chain(self, cache_salt: str | None) -> list[MediaSpan]:
        """Return the spans for the prefix index.

        Digests include the salt, so requests with another salt do not find the encoded images either.
        """
        return [_in_chain(placed, cache_salt) for placed in self.spans]


def _in_chain(placed: MediaPlacement, cache_salt: str | None) -> MediaSpan:
    digest = placed.item.digest
    if cache_salt is not None:
        digest = hashlib.blake2b(f"{digest} {cache_salt}".encode(), digest_size=32).hexdigest()
    return MediaSpan(placed.start, placed.end, digest, placed.item)


@dataclass(frozen=True)
class Placeholders:
    """Texts that a chat template writes for an image and for a video, each of one token, and those around them."""

    image: str
    video: str | None
    start: str
    end: str
    token: str
    """Text of the token of images."""
    of_image: str
    """Text in place of an image's placeholder, with one placeholder of its tokens."""
    has_clock: bool = False
    """True if a frame's time is minutes and seconds, with a space on either side (Gemma 4)."""
    around_slices: tuple[str, str] = ("", "")
    """Texts around a slice of a large image, in models that have slices."""
    number_of_image: str = ""
    """Text before an image, with `{}` for its number in the conversation; empty if it is not written."""
    sound: str | None = None
    """Text of the token of sounds, which the model does not read as text; None if it has none."""

    def check_absent(self, text: str) -> None:
        """Raise RequestError if a text that is not the template's own holds one: it would be taken for an image."""
        for placeholder in (self.image, self.video, self.token, self.sound):
            if placeholder is not None and placeholder in text:
                stands_for = "a sound" if placeholder == self.sound else "an image"
                raise RequestError(
                    f"a message holds the text {placeholder}, which stands for {stands_for} in this model's prompts; "
                    "leave it out, and give images as parts of a message"
                )


def placeholders(
    token_text: TokenText, encode: Encode, vision: VisionSpec, settings: PixelSettings | None = None
) -> Placeholders:
    """Return a model's placeholders. ModelError if its tokenizer does not have their tokens."""
    texts: dict[int, str] = {}
    has_clock = vision.places == "enclosed"
    for token_id in vision.token_ids:
        text = token_text(token_id)
        if has_clock and token_id == vision.video_token_id:
            text = text or VIDEO
        elif text is None or encode(text) != [token_id]:
            raise ModelError(
                f"config.json has {token_id} as a token that stands for images or around them, but tokenizer.json has "
                "no special token of this id"
            )
        texts[token_id] = text
    video, start, end = vision.video_token_id, vision.start_token_id, vision.end_token_id
    image, (before, after) = texts[vision.image_token_id], vision.enclosing
    before = before if start is None else texts[start]
    after = after if end is None else texts[end]
    enclosed = f"{before}{image}{after}"
    of_image = {"tokens": image, "enclosed": enclosed, "start": f"\n\n{enclosed}\n\n"}[vision.places]
    placeholder = before if vision.places == "start" else image
    own = Placeholders(placeholder, None if video is None else texts[video], before, after, image, of_image, has_clock)
    if vision.canvas is None:
        return own
    around = texts[vision.canvas.slice_start], texts[vision.canvas.slice_end]
    is_numbered = settings is not None and settings.slices is not None and settings.slices.numbers_images
    return replace(own, around_slices=around, number_of_image=IMAGE_NUMBER if is_numbered else "")


def media_prompt(
    text: str, media: Sequence[AnyMedia], own: Placeholders, encode: Encode, vision: VisionSpec
) -> MediaPrompt:
    """Make the prompt of a rendered conversation and its images, in their order.

    An image's placeholder becomes one token for each of the image's tokens. A video's becomes, for each temporal patch,
    its time and its tokens, enclosed as an image's are; as in transformers, the text that the template writes around a
    video's placeholder stays. RequestError if the text's placeholders do not match the images.
    """
    expanded, items = _expanded(text, media, own, vision)
    token_ids: list[int] = []
    placed: list[MediaPlacement] = []
    waiting = iter(items)
    for token_id in encode(expanded):
        if token_id == vision.image_token_id:
            item, stand_in = next(waiting)
            placed.append(MediaPlacement(len(token_ids), len(token_ids) + item.num_tokens, item))
            token_ids += [stand_in] * item.num_tokens
        else:
            token_ids.append(token_id)
    assert next(waiting, None) is None, "each placeholder is one token"
    rope = positions_of(token_ids, placed, vision)
    return MediaPrompt(token_ids, tuple(span for span in placed if span.end > span.start), rope)


def positions_of(token_ids: Sequence[int], placed: Sequence[MediaPlacement], vision: VisionSpec) -> RopePositions:
    """Compute the positions of a prompt's tokens by the rule of the model."""
    if vision.canvas is not None:
        return canvas_positions(token_ids, placed, vision.merge_size, vision.canvas)
    return rope_positions(len(token_ids), placed, vision.merge_size)


def _expanded(
    text: str, media: Sequence[AnyMedia], own: Placeholders, vision: VisionSpec
) -> tuple[str, list[tuple[MediaItem, int]]]:
    """Return the text with one token of images per item, and the items in their order, each with its own token."""
    images = [each for each in media if not isinstance(each, Video)]
    videos = [each for each in media if isinstance(each, Video)]
    for kind, placeholder, given in (("images", own.image, images), ("videos", own.video, videos)):
        if placeholder is not None and text.count(placeholder) != len(given):
            raise RequestError(
                f"the conversation has {len(given)} {kind}, but the chat template made places for "
                f"{text.count(placeholder)}; give them in messages of a role that may have them, such as user"
            )
    of_image, of_video, numbers = iter(images), iter(videos), itertools.count()
    items: list[tuple[MediaItem, int]] = []

    def replaced(match: re.Match[str]) -> str:
        if match.group() == own.image:
            image, number = next(of_image), next(numbers)
            parts = (image,) if isinstance(image, MediaItem) else image.items
            items.extend((part, vision.image_token_id) for part in parts)
            if isinstance(image, MediaItem):
                return own.of_image
            if image.is_sliced:
                return own.number_of_image.format(number) + own.of_image + _slice_texts(image, own)
            return _text_with_crops(image, own) if image.has_crops else "".join(_tile_texts(image, own))
        video = next(of_video)
        assert vision.video_token_id is not None, "its text was found"
        items.extend((item, vision.video_token_id) for item in video.items)
        return (" " if own.has_clock else "").join(_patch_texts(video, own))

    pattern = "|".join(re.escape(placeholder) for placeholder in (own.image, own.video) if placeholder is not None)
    return re.sub(pattern, replaced, text), items


def _patch_texts(video: Video, own: Placeholders) -> Iterator[str]:
    for seconds in video.timestamps:
        clock = f"{int(seconds // 60):02d}:{int(seconds % 60):02d} "
        time = clock if own.has_clock else f"<{seconds:.1f} seconds>"
        yield f"{time}{own.start}{own.token}{own.end}"


def _text_with_crops(image: TiledImage, own: Placeholders) -> str:
    """Return the text around the placeholders of an image and its crops, which is that of Gemma 3's processor."""
    crops = " ".join([own.of_image] * (len(image.items) - 1))
    return f"Here is the original image {own.of_image} and here are some crops to help you see better {crops}"


def _slice_texts(image: TiledImage, own: Placeholders) -> str:
    """Return the text with the placeholders of an image's slices, row by row (MiniCPM-V 4.7)."""
    rows, columns = image.grid
    row = own.token.join(own.around_slices) * columns
    return "\n".join([row] * rows) if rows * columns > 1 else ""


def _tile_texts(image: TiledImage, own: Placeholders) -> Iterator[str]:
    """Yield the text around the placeholders of an image's tiles and of its thumbnail (LFM2-VL)."""
    rows, columns = image.grid
    yield own.start
    if rows * columns > 1:
        for row, column in itertools.product(range(1, rows + 1), range(1, columns + 1)):
            yield f"<|img_row_{row}_col_{column}|>{own.image}"
        if len(image.items) > rows * columns:
            yield f"{THUMBNAIL}{own.image}"
    else:
        yield own.image
    yield own.end
