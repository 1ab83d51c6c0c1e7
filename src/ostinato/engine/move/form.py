"""An exported request as bytes: a head, its properties as JSON, and then parts of plain bytes.

None of it is code. An inconsistent export is refused before anything is made of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from pydantic import ValidationError

from ostinato.cache.report import CacheReport
from ostinato.errors import DamagedExport, ForeignExport, RequestError
from ostinato.models.pooling import PoolingKind
from ostinato.plain_data import from_plain, to_json_data
from ostinato.sample.params import SamplingParams
from ostinato.schedule.batch import TokenLogprobs

MAGIC = b"OSTMOVE"
VERSION = b"2"
"""Version of the format of everything after it."""
HEAD = struct.Struct("<7sc16sQ")
"""Head: magic; version; xxh3 of everything after it; bytes of the JSON."""
_CHECKED_FROM = len(MAGIC) + len(VERSION) + 16


@dataclass(frozen=True)
class SampleSnapshot:
    """One of a request's outputs, and how far it was computed. `blocks`, `panes` and `state` are numbers of parts."""

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
    settings: dict[str, Any] | None
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

    identity: dict[str, Any]
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: dict[str, Any]
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
    parts: list[int] = field(default_factory=list)
    """Bytes of each part."""

    @property
    def has_begun(self) -> bool:
        """True if a step has computed a part of it, so that its client has probably received something."""
        return any(each.token_ids or each.num_preemptions or each.num_computed for each in self.samples)


def pack_snapshot(moved: RequestSnapshot, parts: Sequence[memoryview]) -> bytes:
    """Return the bytes of an export. `parts` are those whose numbers it contains."""
    told = to_json_data(moved) | {"parts": [part.nbytes for part in parts]}
    text = json.dumps(told, separators=(",", ":")).encode()
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
        moved = from_plain(RequestSnapshot, json.loads(bytes(packed[HEAD.size : HEAD.size + size])))
        found = _split_parts(packed[HEAD.size + size :], moved.parts)
    except (ValidationError, ValueError, RecursionError) as error:
        raise DamagedExport(f"the exported request does not add up: {_first_line(error)}") from None
    return moved, found


def params_of(moved: RequestSnapshot) -> SamplingParams:
    """Return the sampling parameters of an export. DamagedExport if they are not valid."""
    try:
        return SamplingParams(**moved.params)
    except (RequestError, TypeError) as error:
        raise DamagedExport(f"the sampling parameters of the exported request are none: {error}") from None


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the differences of two engines' identities, one sentence each."""
    names = dict.fromkeys([*ours, *theirs])
    return [
        f"{name} is {_shown(theirs.get(name), ours.get(name))} there and {_shown(ours.get(name), theirs.get(name))} "
        "here"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def check_identity(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise ForeignExport, with all differences, if the identities differ."""
    found = differences(theirs, ours)
    if found:
        raise ForeignExport(found)


def _split_parts(behind: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    found, start = [], 0
    for size in sizes:
        if size < 0 or start + size > len(behind):
            raise ValueError("a part lies beyond the end")
        found.append(behind[start : start + size])
        start += size
    if start != len(behind):
        raise ValueError(f"{len(behind) - start} bytes stand behind the last part")
    return found


def _checksum(packed: memoryview) -> bytes:
    digest: bytes = xxhash.xxh3_128(packed[_CHECKED_FROM:]).digest()
    return digest


def _shown(value: Any, other: Any) -> str:
    """Return a value as text; for two lists, only the items that the other one lacks."""
    if isinstance(value, list) and isinstance(other, list):
        value = [each for each in value if each not in other]
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors()[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
