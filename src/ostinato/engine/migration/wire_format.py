"""Wire format of an exported request: a head, its properties as JSON, and then parts of plain bytes.

None of it is code. An inconsistent export is refused before anything is made of it. Images travel as pixels and
positions, and are made again on the other side.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from pydantic import ValidationError

from ostinato.errors import DamagedExport, ForeignExport, RequestError
from ostinato.json_io import JsonObject, from_plain, to_json_data
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.prefix_index import CacheReport
from ostinato.media.media_item import MediaItem, Patches, RopePositions
from ostinato.media.media_prompt import MediaPlacement, MediaPrompt
from ostinato.media.preprocess import digest_of
from ostinato.media.processor_config import PixelSettings
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import PoolingKind
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.setting_names import plain_words

MAGIC = b"OSTMOVE"
VERSION = b"3"
"""Version of the format of everything after it."""
HEAD = struct.Struct("<7sc16sQ")
"""Head: magic; version; xxh3 of everything after it; bytes of the JSON."""
_CHECKED_FROM = len(MAGIC) + len(VERSION) + 16


@dataclass(frozen=True)
class SampleSnapshot:
    """One of a request's outputs, and how far it was computed.

    `blocks`, `panes` (window blocks) and `state` are numbers of parts.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | None
    cache: CacheReport | None
    num_prompt_logprobs: int
    num_preemptions: int
    num_computed: int
    """Tokens whose keys, values and state the exporting engine had."""
    has_memory: bool = False
    """True if these are in the export."""
    blocks: list[int] = field(default_factory=list)
    panes: list[int] = field(default_factory=list)
    state: int | None = None


@dataclass(frozen=True)
class ImageSnapshot:
    """An image, and the span of its tokens. `pixels` and `kept` are numbers of parts."""

    start: int
    end: int
    grid: tuple[int, int]
    digest: str
    pixels: int
    shape: list[int]
    settings: JsonObject | None
    """Settings of uint8 pixels, from which patches are made; None if `pixels` are the patches, as float32."""
    kept: int | None


@dataclass(frozen=True)
class MediaSnapshot:
    """The images of a prompt. `rope` is the number of a part: [prompt tokens, 3] int64."""

    items: list[ImageSnapshot]
    rope: int
    rope_delta: int


@dataclass(frozen=True)
class RequestSnapshot:
    """Properties of a request, without plain bytes. Times are in seconds before it was exported."""

    identity: JsonObject
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: JsonObject
    """Arguments of `SamplingParams`."""
    seed: int
    """The seed in effect, also if `params` bring none."""
    priority: int
    cache_salt: str | None
    client: str | None
    pooling: PoolingKind | None
    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    samples: list[SampleSnapshot]
    media: MediaSnapshot | None
    marks: list[Mark] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    """Bytes of each part."""

    @property
    def has_begun(self) -> bool:
        """True if a step has computed a part of it, so that its client has probably received something."""
        return any(sample.token_ids or sample.num_preemptions or sample.num_computed for sample in self.samples)


def pack_snapshot(snapshot: RequestSnapshot, parts: Sequence[memoryview]) -> bytes:
    """Return the bytes of an export. `parts` are those whose numbers it contains."""
    head = to_json_data(snapshot) | {"parts": [part.nbytes for part in parts]}
    text = json.dumps(head, separators=(",", ":")).encode()
    whole = bytearray(HEAD.pack(MAGIC, VERSION, bytes(16), len(text)))
    whole += text
    for part in parts:
        whole += part
    whole[len(MAGIC) + len(VERSION) : _CHECKED_FROM] = _checksum(memoryview(whole))
    return bytes(whole)


def unpack_snapshot(data: bytes) -> tuple[RequestSnapshot, list[memoryview]]:
    """Return the arguments of `pack_snapshot`. DamagedExport for other bytes, ForeignExport for another version."""
    packed = memoryview(data).cast("B")
    if len(packed) < HEAD.size:
        raise DamagedExport(f"an exported request has at least {HEAD.size} bytes, and this has {len(packed)}")
    magic, version, checksum, size = HEAD.unpack_from(packed)
    if magic != MAGIC:
        raise DamagedExport(f"this is no exported request: it begins with {magic!r}, and not with {MAGIC!r}")
    if version != VERSION:
        raise ForeignExport([f"the version of the export is {version!r} there and {VERSION!r} here"])
    if checksum != _checksum(packed):
        raise DamagedExport("the exported request is damaged: its checksum is that of other bytes")
    try:
        snapshot = from_plain(RequestSnapshot, json.loads(bytes(packed[HEAD.size : HEAD.size + size])))
        parts = _split_parts(packed[HEAD.size + size :], snapshot.parts)
    except (ValidationError, ValueError, RecursionError) as error:
        raise DamagedExport(f"the exported request does not add up: {_first_line(error)}") from None
    return snapshot, parts


def params_of(snapshot: RequestSnapshot) -> SamplingParams:
    """Return the sampling parameters of an export. DamagedExport if they are not valid."""
    try:
        return SamplingParams(**snapshot.params)
    except (RequestError, TypeError) as error:
        raise DamagedExport(f"the sampling parameters of the exported request are none: {error}") from None


def differences(exported_identity: JsonObject, own_identity: JsonObject) -> list[str]:
    """Return the differences of two engines' identities, one sentence each."""
    sentences = []
    for name in dict.fromkeys([*own_identity, *exported_identity]):
        there, here = exported_identity.get(name), own_identity.get(name)
        if there != here:
            sentences.append(f"{name} is {_shown(there, here)} there and {_shown(here, there)} here")
    return sentences


def check_identity(exported_identity: JsonObject, own_identity: JsonObject) -> None:
    """Raise ForeignExport, with all differences, if the identities differ."""
    conflicts = differences(exported_identity, own_identity)
    if conflicts:
        raise ForeignExport(conflicts)


def _split_parts(behind: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    parts, start = [], 0
    for size in sizes:
        if size < 0 or start + size > len(behind):
            raise ValueError("a part lies beyond the end")
        parts.append(behind[start : start + size])
        start += size
    if start != len(behind):
        raise ValueError(f"{len(behind) - start} bytes follow the last part")
    return parts


def _checksum(packed: memoryview) -> bytes:
    digest: bytes = xxhash.xxh3_128(packed[_CHECKED_FROM:]).digest()
    return digest


def _shown(value: object, other: object) -> str:
    """Return a value as text; for two lists, only the items that the other one lacks."""
    if isinstance(value, list) and isinstance(other, list):
        value = [each for each in value if each not in other]
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {plain_words(first)}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class ByteParts:
    """Bytes that follow an export's head, each identified by its number."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self._numbers: dict[int, int] = {}

    def add(self, part: memoryview) -> int:
        """Add a part and return its number."""
        self.parts.append(part.cast("B"))
        return len(self.parts) - 1

    def add_once(self, part: memoryview) -> int:
        """Add a part unless it is there, and return its number. `part` must live as long as these parts."""
        if id(part) not in self._numbers:
            self._numbers[id(part)] = self.add(part)
        return self._numbers[id(part)]

    def add_array(self, array: np.ndarray) -> int:
        return self.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def export_media(media: MediaPrompt, parts: ByteParts) -> MediaSnapshot:
    """Return all images, also those already computed: an engine that loses the request's memory needs them again."""
    items = [_export_item(span, parts) for span in media.spans]
    return MediaSnapshot(items, parts.add_array(media.rope.prompt), media.rope.delta)


def import_media(snapshot: MediaSnapshot, token_ids: list[int], parts: Sequence[memoryview]) -> MediaPrompt:
    """Return the media of an export. DamagedExport, or ValueError, if images and prompt do not fit each other."""
    rope = np.frombuffer(parts[snapshot.rope], np.int64).reshape(len(token_ids), 3)
    spans, end = [], 0
    for image in snapshot.items:
        if not end <= image.start < image.end < len(token_ids):
            raise DamagedExport("the images of the exported request are not in order, or stand beyond its prompt")
        end = image.end
        spans.append(MediaPlacement(image.start, image.end, _import_item(image, parts)))
    return MediaPrompt(token_ids, tuple(spans), RopePositions(rope, snapshot.rope_delta))


def _export_item(span: MediaPlacement, parts: ByteParts) -> ImageSnapshot:
    item = span.item
    settings, pixels = None, item.patches
    if isinstance(pixels, Patches):
        settings, pixels = to_json_data(pixels.settings), pixels.frames
    kept = None if item.kept is None else parts.add_array(item.kept)
    shape = list(pixels.shape)
    return ImageSnapshot(span.start, span.end, item.grid, item.digest, parts.add_array(pixels), shape, settings, kept)


def _import_item(snapshot: ImageSnapshot, parts: Sequence[memoryview]) -> MediaItem:
    kept = None if snapshot.kept is None else np.frombuffer(parts[snapshot.kept], np.int64)
    settings = None if snapshot.settings is None else from_plain(PixelSettings, snapshot.settings)
    is_float = settings is None or settings.in_floats
    pixels = np.frombuffer(parts[snapshot.pixels], np.float32 if is_float else np.uint8).reshape(snapshot.shape)
    patches: np.ndarray | Patches = pixels
    if settings is not None:
        # The digest must match the image, which may become another request's hit.
        if digest_of(pixels, kept, settings) != snapshot.digest:
            raise DamagedExport("an image of the exported request does not match its digest")
        patches = Patches(pixels, settings)
    return MediaItem(patches, snapshot.grid, snapshot.end - snapshot.start, snapshot.digest, kept)
