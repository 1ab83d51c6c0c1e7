"""What `ostinato bench encoder` asks for: images of mixed sizes, alone and a few at once, and prompts with one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from ostinato.media.item import MediaItem
from ostinato.media.prompt import MediaPrompt, PlacedItem
from ostinato.media.rope import rope_positions
from ostinato.media.settings import PixelSettings
from ostinato.media.sizes import image_size
from ostinato.plan.model import VisionSpec

SIZES = (
    (224, 224), (336, 336), (448, 448), (512, 512), (640, 480), (800, 600), (1024, 768), (1280, 720), (1920, 1080),
    (320, 64), (768, 256),
)  # fmt: skip
"""Width and height in pixels: thumbnails, screens, photographs, lines of text. Each also comes upright."""

TEXT = 16
"""Tokens of text before an image, and as many behind it."""
AROUND = 2 * TEXT + 2
"""All tokens of a prompt that no image stands for."""


@dataclass(frozen=True)
class EncoderBench:
    """What is measured: `arrivals` that bring one image each, and as many that bring `batch` of them at once, the same
    in each of `rounds`. `max_pixels` bounds an image's size further than the checkpoint does; None: it does not."""

    arrivals: int
    batch: tuple[int, int]
    rounds: int
    seed: int = 0
    max_pixels: int | None = None


def pixel_settings(bench: EncoderBench, checkpoint: PixelSettings, max_item_tokens: int) -> PixelSettings:
    """The checkpoint's, with no image larger than is served."""
    limits = (checkpoint.max_pixels, max_item_tokens * checkpoint.factor**2, bench.max_pixels or checkpoint.max_pixels)
    most = max(min(limits), checkpoint.factor**2)
    return replace(checkpoint, max_pixels=most, min_pixels=min(checkpoint.min_pixels, most))


def make_arrivals(
    bench: EncoderBench, pixels: PixelSettings, patch_elements: int
) -> tuple[list[list[MediaItem]], list[list[MediaItem]]]:
    """The images of each arrival: those that come alone, and those that come together. Random patches, seeded."""
    rng, values = random.Random(bench.seed), np.random.default_rng(bench.seed)

    def image() -> MediaItem:
        width, height = rng.choice(SIZES)
        if rng.random() < 0.5:
            width, height = height, width
        rows, columns = (side // pixels.patch_size for side in image_size(height, width, pixels))
        patches = values.standard_normal((rows * columns, patch_elements), dtype=np.float32)
        return MediaItem(patches, (rows, columns), rows * columns // pixels.merge_size**2, f"image {rng.random()}")

    alone = [[image()] for _ in range(bench.arrivals)]
    together = [[image() for _ in range(rng.randint(*bench.batch))] for _ in range(bench.arrivals)]
    return alone, together


def prompt_of(item: MediaItem, vision: VisionSpec | None, vocab_size: int, seed: int) -> MediaPrompt:
    """An image with random tokens around it."""
    assert vision is not None, "the model takes images"
    rng = random.Random(seed)
    named = (vision.image_token_id, vision.video_token_id, vision.start_token_id, vision.end_token_id)
    text = [token for token in rng.choices(range(vocab_size), k=4 * TEXT + 64) if token not in named][: 2 * TEXT]
    before, behind = [*text[:TEXT], vision.start_token_id], [vision.end_token_id, *text[TEXT:]]
    placed = PlacedItem(len(before), len(before) + item.num_tokens, item)
    token_ids = [*before, *[vision.image_token_id] * item.num_tokens, *behind]
    return MediaPrompt(token_ids, (placed,), rope_positions(len(token_ids), [placed], vision.merge_size))
