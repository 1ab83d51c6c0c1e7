"""Files of a record: segments of checked, compressed blocks, and the pieces in them.

A run of an engine has a folder, with a segment after another. A segment is `MAGIC` and blocks: each has the number of
its bytes, their CRC-32, and a part of one zlib stream, which ends at a byte. The stream holds pieces: a kind, a number
of bytes, the bytes. The first piece of a segment is its head (`RecordHead`).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from ostinato.errors import DamagedRecord, RecordError, TruncatedRecord, os_error_text
from ostinato.files import is_directory, is_file, matches
from ostinato.json_io import JsonObject, from_plain, parse_json, to_json_data
from ostinato.scheduler.request import FinishReason

MAGIC = b"OSTREC01"
SUFFIX = ".rec"
BLOCK = struct.Struct("<II")
"""Head of a block: its bytes, their CRC-32."""
PIECE = struct.Struct("<BI")
"""Head of a piece: its kind, its bytes."""
HASH_CHECK = hash((1, (2, 3), -1))
"""A hash of numbers. Batches are compared by such hashes, which every 64-bit CPython since 3.8 computes alike."""


class PieceKind(IntEnum):
    """Kind of a piece: the head, or an event in the order in which the engine saw it."""

    HEAD = 1
    REQUEST = 2
    STEP = 3
    """A step that is over, with its batch and its tokens."""
    ABORT = 4
    PREEMPT = 5
    MOVED = 6
    """A request that went to another engine."""
    RESET = 7
    """The prefix cache was reset."""
    END = 8
    """The engine was closed."""


@dataclass(frozen=True)
class RecordHead:
    """Head of a segment: its place, and the engine that made it.

    `settings` are the given ones. `schedule` is what batches depend on besides the requests. `identity` has weights,
    kernels and version. A segment with `number` 0 begins with an empty engine. `follows` is false if events between it
    and the segment before are missing.
    """

    number: int
    follows: bool
    created: str
    settings: JsonObject
    schedule: JsonObject
    identity: JsonObject
    plan: JsonObject
    gaps: list[str]
    """Reasons why batches cannot be the same in a replay."""
    hash_check: int = HASH_CHECK


@dataclass(frozen=True)
class RequestHead:
    """Properties of a request that its snapshot does not have.

    `resumed`: it had come before the segment began. `images` are the digests of images whose pixels were not recorded.
    `arrival` is the scheduler's time, by which pins of checkpoints end.
    """

    weight: int = 1
    imported: bool = False
    resumed: bool = False
    images: list[str] = field(default_factory=list)
    arrival: float = 0.0


class RowRecord(NamedTuple):
    """One row of a step: its output's number, the tokens computed (drafts aside), and those it gave.

    `end` is why the output ended, after `visible` tokens. A void row's output had ended before.
    """

    number: int
    computed: int
    token_ids: tuple[int, ...]
    end: str | None = None
    visible: int | None = None
    is_void: bool = False


class StepRecord(NamedTuple):
    """A finished step.

    `is_called` is false if it was finished outside `EngineCore.step`. `ticks` are units of 10 microseconds since the
    step before. `drafts` is the number of drafts asked for. `batch_hash` covers rows, blocks, slots and checkpoints,
    `bits` the log-probabilities that requests asked for (0: none).
    """

    is_called: bool
    has_failed: bool
    ticks: int
    drafts: int
    batch_hash: int
    bits: int
    rows: tuple[RowRecord, ...]


_STEP = struct.Struct("<BIHqqI")
_CALLED, _FAILED, _PLAIN, _SAME = 1, 2, 4, 8
_ENDS = (None, "void", *(reason.value for reason in FinishReason))
_END_NUMBERS = {end: number for number, end in enumerate(_ENDS)}
MAX_TICKS = 2**32 - 1


class StepEncoder:
    """Encoder of steps. Of a step that only decodes, with the rows of the one before, only the tokens are written."""

    def __init__(self) -> None:
        self._last: list[int] = []

    def encode_plain(
        self, is_called: bool, ticks: int, drafts: int, batch_hash: int, numbers: list[int], tokens: list[int]
    ) -> bytes:
        """Return a step in which each row computed and gave one token."""
        same = numbers == self._last
        self._last = numbers
        flags = is_called * _CALLED | _PLAIN | same * _SAME
        head = _STEP.pack(flags, ticks, drafts, batch_hash, 0, len(tokens))
        return head + array("I", tokens if same else numbers + tokens).tobytes()

    def encode(self, step: StepRecord) -> bytes:
        """Return any step."""
        values: list[int] = []
        for row in step.rows:
            end = _END_NUMBERS["void" if row.is_void else row.end]
            values += (row.number, row.computed, end, row.visible or 0, len(row.token_ids), *row.token_ids)
        self._last = []
        flags = step.is_called * _CALLED | step.has_failed * _FAILED
        head = _STEP.pack(flags, step.ticks, step.drafts, step.batch_hash, step.bits, len(step.rows))
        return head + array("I", values).tobytes()


class StepDecoder:
    """Decoder of what a `StepEncoder` wrote, in the same order."""

    def __init__(self) -> None:
        self._last: list[int] = []

    def decode(self, data: bytes) -> StepRecord:
        """Return the step. ValueError, IndexError or struct.error for other bytes."""
        flags, ticks, drafts, batch_hash, bits, count = _STEP.unpack_from(data)
        values = array("I")
        values.frombytes(data[_STEP.size :])
        rows: list[RowRecord] = []
        if flags & _PLAIN:
            numbers = self._last if flags & _SAME else values[:count].tolist()
            tokens = values[0 if flags & _SAME else count :].tolist()
            rows = [RowRecord(number, 1, (token,)) for number, token in zip(numbers, tokens, strict=True)]
            self._last = numbers
        else:
            place = 0
            for _ in range(count):
                number, computed, end, visible, num_tokens = values[place : place + 5].tolist()
                tokens = values[place + 5 : place + 5 + num_tokens].tolist()
                place += 5 + num_tokens
                is_void = _ENDS[end] == "void"
                ended = None if is_void else _ENDS[end]
                rows.append(
                    RowRecord(number, computed, tuple(tokens), ended, visible if ended is not None else None, is_void)
                )
            self._last = []
        if len(rows) != count:
            raise ValueError("a step has another number of rows than it says")
        return StepRecord(bool(flags & _CALLED), bool(flags & _FAILED), ticks, drafts, batch_hash, bits, tuple(rows))


def pack_piece(kind: PieceKind, payload: bytes = b"") -> bytes:
    return PIECE.pack(kind, len(payload)) + payload


def pack_head(head: RecordHead) -> bytes:
    return pack_piece(PieceKind.HEAD, json.dumps(to_json_data(head), separators=(",", ":")).encode())


def pack_request(head: RequestHead, snapshot: bytes) -> bytes:
    """Return the piece of a request, whose snapshot is packed as an exported request is."""
    text = json.dumps(to_json_data(head), separators=(",", ":")).encode()
    return pack_piece(PieceKind.REQUEST, len(text).to_bytes(4, "little") + text + snapshot)


def unpack_request(payload: bytes) -> tuple[RequestHead, bytes]:
    """Return the arguments of `pack_request`. ValueError for other bytes."""
    end = 4 + int.from_bytes(payload[:4], "little")
    return from_plain(RequestHead, parse_json(payload[4:end])), payload[end:]


class BlockWriter:
    """Writer of the blocks of one segment. The bytes are those of an open file, and none of it is buffered here."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(1)

    def block(self, pieces: Sequence[bytes]) -> bytes:
        """Return the next block of the segment."""
        packed = self._stream.compress(b"".join(pieces)) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        return BLOCK.pack(len(packed), zlib.crc32(packed)) + packed


def segments_of(folder: Path) -> list[Path]:
    """Return the segments of a run, oldest first."""
    return matches(folder, f"*{SUFFIX}")


def is_segment(path: Path) -> bool:
    """Return whether a file has the name and the first bytes of a segment, of any version. May raise OSError."""
    if not re.fullmatch(rf"\d{{6,}}{re.escape(SUFFIX)}", path.name) or not is_file(path):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)).startswith(MAGIC[:-2])


def find_run(path: Path) -> Path:
    """Return the folder of a run: `path`, or the one in it whose name is last. RecordError if there is none."""
    if segments_of(path):
        return path
    runs = [each for each in matches(path, "*") if is_directory(each) and segments_of(each)]
    if not runs:
        raise RecordError(
            f"{path} holds no record: give the directory that --record named, or the folder of a run in it"
        )
    return runs[-1]


def read_pieces(path: Path) -> Iterator[tuple[PieceKind, bytes]]:
    """Yield the pieces of a segment.

    Raises TruncatedRecord where the file ends within a block, DamagedRecord at other bytes than were written, and
    RecordError if it cannot be read or is of another version. What was yielded before is whole.
    """
    if not is_file(path):
        raise RecordError(f"{path} is no file")
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {os_error_text(error)}") from None
    magic = bytes(data[: len(MAGIC)])
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            raise TruncatedRecord(f"{path} ends at byte {len(data)}, before its first block")
        known = magic[:-2] == MAGIC[:-2]
        other = f"has version {magic[-2:]!r}, and this program reads {MAGIC[-2:]!r}" if known else "is no record"
        raise (RecordError if known else DamagedRecord)(f"{path} {other}")
    place, stream, pending = len(MAGIC), zlib.decompressobj(), bytearray()
    while place < len(data):
        end = place + BLOCK.size
        size, checksum = BLOCK.unpack_from(data, place) if end <= len(data) else (0, 0)
        if end > len(data) or end + size > len(data):
            raise TruncatedRecord(f"{path} ends at byte {len(data)}, within the block that begins at byte {place}")
        packed = data[end : end + size]
        if zlib.crc32(packed) != checksum:
            raise DamagedRecord(f"{path}: the block at byte {place} is damaged, its checksum is that of other bytes")
        try:
            pending += stream.decompress(packed)
        except zlib.error as error:
            raise DamagedRecord(f"{path}: the block at byte {place} is damaged ({error})") from None
        yield from _whole_pieces(pending, path, place)
        place = end + size


def _whole_pieces(pending: bytearray, path: Path, place: int) -> Iterator[tuple[PieceKind, bytes]]:
    """Yield the pieces at the start of `pending`, and remove them. A block holds whole pieces."""
    start = 0
    while start < len(pending):
        try:
            kind, size = PIECE.unpack_from(pending, start)
            known = PieceKind(kind)
        except (struct.error, ValueError) as error:
            raise DamagedRecord(f"{path}: the block at byte {place} has a piece of an unknown kind ({error})") from None
        begin = start + PIECE.size
        if begin + size > len(pending):
            raise DamagedRecord(f"{path}: the block at byte {place} ends within a piece")
        yield known, bytes(pending[begin : begin + size])
        start = begin + size
    del pending[:start]


def read_head(path: Path) -> RecordHead:
    """Return the head of a segment. RecordError if there is none."""
    return _head_of(next(read_pieces(path), None), path)


def _head_of(piece: tuple[PieceKind, bytes] | None, path: Path) -> RecordHead:
    if piece is None:
        raise TruncatedRecord(f"{path} has no block yet")
    try:
        if piece[0] is not PieceKind.HEAD:
            raise ValueError(f"its first piece is a {piece[0].name.lower()}")
        return from_plain(RecordHead, parse_json(piece[1]))
    except (ValidationError, ValueError) as error:
        raise DamagedRecord(f"{path} does not begin with a head: {str(error).splitlines()[0]}") from None
