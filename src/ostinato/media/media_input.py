"""Conversion of a conversation with images into a model's prompt, shared by LLM, the commands and the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image

from ostinato.errors import MediaError, Remedy, RequestError
from ostinato.formats.checkpoint_json import read_checkpoint_json
from ostinato.media.load import MediaSources, load_image
from ostinato.media.media_item import MediaItem
from ostinato.media.media_prompt import AnyMedia, Encode, MediaPrompt, Placeholders, media_prompt, placeholders
from ostinato.media.message_media import MediaPart, Message, split_media, texts
from ostinato.media.preprocess import TiledImage, Video, process_crops, process_slices, process_tiles, process_video
from ostinato.media.processor_config import MediaSettings, PixelSettings, TileSettings, load_media_settings
from ostinato.media.resize import image_size, slice_grid, slice_size, tile_grid, video_size
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.plan import Plan

Render = Callable[[Sequence[Message]], str]
"""Function from a conversation, whose images have no content, to its text."""

SOUND_TOKENS = ("audio_token_id", "sound_context_token_id")
"""Names in config.json of the token of sounds, which no model takes here."""

SizeOf = Callable[[PixelSettings], tuple[int, int]]
"""Function from settings to the height and width of a resized item."""


class TextTokens(Protocol):
    """Methods that this module needs of a tokenizer."""

    @property
    def has_text(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def token_text(self, token_id: int) -> str | None: ...


class RenderedChat(NamedTuple):
    """A conversation in the model's form."""

    text: str
    """Output of the chat template, with special tokens and one placeholder for each image and video."""
    media: MediaPrompt | None
    """None for a conversation without images: its prompt is the text."""


@dataclass(frozen=True)
class MediaInput:
    """Settings by which a model takes in images and videos, and limits of what it accepts."""

    vision: VisionSpec
    settings: MediaSettings
    placeholders: Placeholders
    encode: Encode
    sources: MediaSources
    max_item_tokens: int
    """Largest number of tokens of an image, or of one temporal patch of a video, without pruning."""
    max_prompt_tokens: int
    pruning_rate: float = 0.0
    max_images: int | None = None
    """Largest number of images in a conversation, frames of videos included."""
    max_pixels: int | None = None
    """Largest number of pixels of all these images together, before resizing."""

    def prepare(self, parts: Sequence[MediaPart]) -> list[AnyMedia]:
        """Load the images and cut them into patches. RequestError names the place of one that cannot be taken."""
        count = sum(len(part.sources) for part in parts)
        if self.max_images is not None and count > self.max_images:
            raise RequestError(
                f"the conversation has {count} images, frames of videos among them, and at most {self.max_images} are "
                "taken"
            )
        self.sources.meter.begin(self.max_pixels)
        prepared: list[AnyMedia] = []
        tokens, of_image = 0, self.settings.image.of_images(sum(part.kind == "image" for part in parts))
        for part in parts:
            try:
                made = self._image(part, of_image) if part.kind == "image" else self._video(part)
            except RequestError as error:
                raise MediaError(part.where, error.message, error.remedies) from None
            prepared.append(made)
            tokens += sum(item.num_tokens for item in ((made,) if isinstance(made, MediaItem) else made.items))
            if tokens > self.max_prompt_tokens:
                raise MediaError(
                    part.where,
                    f"the images up to this one alone have {tokens} tokens, and a request has room for "
                    f"{self.max_prompt_tokens} beside its output; leave some out, or give them max_pixels",
                )
        return prepared

    def _image(self, part: MediaPart, settings: PixelSettings) -> MediaItem | TiledImage:
        image = load_image(part.sources[0], self.sources)
        settings = part.limits(settings)
        self._check_tokens(settings, partial(image_size, image.height, image.width), 1)
        if settings.slices is not None:
            grid = slice_grid(image.height, image.width, settings)
            if grid != (1, 1):
                self._check_tokens(settings, partial(slice_size, image.height, image.width, grid), 1)
            return process_slices(image, settings)
        if not self.vision.cuts_tiles:
            return process_crops(image, settings)
        if settings.tiles is not None and tile_grid(image.height, image.width, settings) != (1, 1):
            self._check_tokens(settings, partial(_tile_size, settings.tiles), 1)
        return process_tiles(image, settings)

    def _video(self, part: MediaPart) -> Video:
        if self.vision.video_token_id is None:
            raise RequestError("this model takes images, and no videos; give some of its frames as images")
        settings = part.limits(self.settings.video)

        def frames() -> Iterator[Image.Image]:
            # Load one after the other: frames before resizing may be many times larger.
            for i, source in enumerate(part.sources):
                frame = load_image(source, self.sources)
                if i == 0:
                    size = partial(video_size, len(part.sources), frame.height, frame.width)
                    self._check_tokens(settings, size, len(part.sources))
                yield frame

        return process_video(frames(), len(part.sources), part.fps, settings, self.pruning_rate)

    def _check_tokens(self, settings: PixelSettings, size: SizeOf, num_frames: int) -> None:
        """Check the numbers of tokens before resizing, so that an image or video of absurd size is never made."""
        height, width = size(settings)
        tokens = height * width // settings.factor**2
        if tokens <= self.max_item_tokens:
            whole = math.ceil(num_frames / settings.temporal_patch_size) * tokens
            if whole * (1 - self.pruning_rate) > self.max_prompt_tokens:
                raise RequestError(
                    f"its {num_frames} frames of {width}x{height} pixels are {whole} tokens, and a request has room "
                    f"for {self.max_prompt_tokens} beside its output; leave frames out, or give it max_pixels"
                )
            return
        remedies = [Remedy("max_pixels", pixels) for pixels in self._fitting(settings, size)]
        raise RequestError(
            f"it is resized to {width}x{height} pixels, which are {tokens} tokens, and one image may have at most "
            f"{self.max_item_tokens} (of max_num_batched_tokens and max_model_len the lesser); make it smaller"
            + "".join(f', or give it "max_pixels": {remedy.value}' for remedy in remedies),
            remedies,
        )

    def _fitting(self, settings: PixelSettings, size: SizeOf) -> list[int]:
        """Return the pixel limit that keeps the item within `max_item_tokens`, or nothing if there is none."""
        pixels = min(settings.max_pixels, self.max_item_tokens * settings.factor**2)
        while pixels >= 1:
            limited = MediaPart(settings.kind, (), "", max_pixels=pixels).limits(settings)
            height, width = size(limited)
            if height * width <= self.max_item_tokens * settings.factor**2:
                return [pixels]
            pixels = pixels * 7 // 8
        return []


def _tile_size(tiles: TileSettings, limited: PixelSettings) -> tuple[int, int]:
    """Return the size of a tile, or of nothing if the limits leave an image uncut."""
    side = tiles.size if limited.tiles is not None else 0
    return side, side


def load_media_input(
    directory: Path, vision: VisionSpec | None, tokenizer: TextTokens, plan: Plan, remote: bool
) -> MediaInput | None:
    """Return how a checkpoint's model takes in images from files and, if `remote`, from URLs.

    None for a text-only model, and for one whose text is unknown too. ModelError if the directory's files are damaged
    or contradict each other.
    """
    if vision is None or plan.encoder is None or not tokenizer.has_text:
        return None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    settings = load_media_settings(directory, vision)
    config = read_checkpoint_json(directory, "config.json")
    sounds = (config[name] for name in SOUND_TOKENS if type(config.get(name)) is int and config[name] >= 0)
    sound = next(filter(None, map(tokenizer.token_text, sounds)), None)
    return MediaInput(
        vision,
        settings,
        replace(placeholders(tokenizer.token_text, encode, vision, settings.image), sound=sound),
        encode,
        MediaSources(files=True, remote=remote),
        max_item_tokens=plan.encoder.max_item_tokens,
        max_prompt_tokens=plan.settings.max_model_len - 1,  # one is left for the output
        pruning_rate=plan.encoder.video_pruning_rate,
    )


def render_chat(
    messages: Sequence[Message],
    render: Render,
    media: MediaInput | None,
    others: object = None,
    places: Sequence[str] | None = None,
) -> RenderedChat:
    """Return the prompt of a conversation; `media` is None for a text-only model.

    `others` is whatever else the template writes out, such as tools; `places` are the names of the messages in errors.
    A text of the request that holds a placeholder of images is refused, since it would be taken for one. RequestError
    for images that cannot be taken, and if the template refuses the conversation.
    """
    plain, parts = split_media(messages, places)
    if media is None:
        if parts:
            reason = "this model takes text only, and no images; leave it out, or choose a model with vision"
            raise MediaError(parts[0].where, f"{reason}. If it should take them, `ostinato plan` says why not")
        return RenderedChat(render(plain), None)
    for text in texts([plain, others]):
        media.placeholders.check_absent(text)
    text = render(plain)
    if not parts:
        return RenderedChat(text, None)
    prepared = media.prepare(parts)
    return RenderedChat(text, media_prompt(text, prepared, media.placeholders, media.encode, media.vision))
