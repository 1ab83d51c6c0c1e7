"""Images of a migrating request: pixels and positions as plain bytes, and the images made from them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.engine.move.form import ImageSnapshot, MediaSnapshot
from ostinato.engine.move.parts import ByteParts
from ostinato.errors import DamagedExport
from ostinato.media.item import MediaItem, RopePositions
from ostinato.media.patches import Patches
from ostinato.media.processor import digest_of
from ostinato.media.prompt import MediaPrompt, MediaPlacement
from ostinato.media.settings import PixelSettings
from ostinato.plain_data import from_plain, to_json_data


def export_media(media: MediaPrompt, parts: ByteParts) -> MediaSnapshot:
    """Return all images, also those already computed: an engine that loses the request's memory needs them again."""
    items = [_export_item(span, parts) for span in media.spans]
    return MediaSnapshot(items, parts.add_array(media.rope.prompt), media.rope.delta)


def import_media(moved: MediaSnapshot, token_ids: list[int], parts: Sequence[memoryview]) -> MediaPrompt:
    """Return the media of an export. DamagedExport, or ValueError, if images and prompt do not fit each other."""
    rope = np.frombuffer(parts[moved.rope], np.int64).reshape(len(token_ids), 3)
    spans, end = [], 0
    for each in moved.items:
        if not end <= each.start < each.end < len(token_ids):
            raise DamagedExport("the images of the exported request are not in order, or stand beyond its prompt")
        end = each.end
        spans.append(MediaPlacement(each.start, each.end, _import_item(each, parts)))
    return MediaPrompt(token_ids, tuple(spans), RopePositions(rope, moved.rope_delta))


def _export_item(span: MediaPlacement, parts: ByteParts) -> ImageSnapshot:
    item = span.item
    settings, pixels = None, item.patches
    if isinstance(pixels, Patches):
        settings, pixels = to_json_data(pixels.settings), pixels.frames
    kept = None if item.kept is None else parts.add_array(item.kept)
    shape = list(pixels.shape)
    return ImageSnapshot(span.start, span.end, item.grid, item.digest, parts.add_array(pixels), shape, settings, kept)


def _import_item(moved: ImageSnapshot, parts: Sequence[memoryview]) -> MediaItem:
    kept = None if moved.kept is None else np.frombuffer(parts[moved.kept], np.int64)
    pixels = np.frombuffer(parts[moved.pixels], np.float32 if moved.settings is None else np.uint8)
    pixels = pixels.reshape(moved.shape)
    patches: np.ndarray | Patches = pixels
    if moved.settings is not None:
        settings = from_plain(PixelSettings, moved.settings)
        # The digest must match the image, which may become another request's hit.
        if digest_of(pixels, kept, settings) != moved.digest:
            raise DamagedExport("an image of the exported request is not the one that its digest is of")
        patches = Patches(pixels, settings)
    return MediaItem(patches, moved.grid, moved.end - moved.start, moved.digest, kept)
