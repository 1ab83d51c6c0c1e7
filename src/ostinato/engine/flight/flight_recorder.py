"""The flight recorder: it notes what enters an engine and what each step did, and a thread writes it to files.

With counter-based noise and a scheduler that reads no clock, a run is a function of what is noted here.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from ostinato.config import EngineConfig
from ostinato.engine.flight.record_files import (
    MAGIC,
    MAX_TICKS,
    SUFFIX,
    BlockWriter,
    PieceKind,
    RecordHead,
    RequestHead,
    RowRecord,
    StepEncoder,
    StepRecord,
    is_segment,
    pack_head,
    pack_piece,
    pack_request,
    segments_of,
)
from ostinato.engine.migration.export_import import make_snapshot
from ostinato.engine.migration.wire_format import ByteParts, RequestSnapshot, pack_snapshot
from ostinato.engine.output_processor import OutputProcessor, RequestState
from ostinato.engine.outputs import CompletionOutput
from ostinato.errors import ConfigError, os_error_text
from ostinato.files import expand, matches
from ostinato.json_io import JsonObject
from ostinato.observe.counts import RecordCounts
from ostinato.plan.plan import Plan
from ostinato.scheduler.batch import Batch
from ostinato.scheduler.request import RequestUpdate
from ostinato.scheduler.request_queues import client_weight
from ostinato.scheduler.scheduler import Scheduler

log = logging.getLogger("ostinato.engine")

SCHEDULE_SETTINGS = (
    "block_size", "enable_prefix_caching", "state_cache_mode", "state_block_size", "checkpoint_policy",
    "eviction_policy", "overlap", "num_speculative_tokens", "tensor_parallel_size",
)  # fmt: skip
"""Settings that batches depend on, besides the scheduler's limits and the sizes of the cache."""
PERIOD = 0.05
"""Seconds between two looks of the writer. What is younger is lost if the process is killed."""
MAX_PIECES = 2**16
"""Pieces that may wait to be written. Beyond that they are left out, and a new segment begins."""
BLOCK_BYTES = 2**18
SEGMENTS = 8
"""Segments that `record_limit` has room for. The oldest is removed when another one begins."""
_RUN = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?")
"""Names of the folders that recorders make; nothing is ever removed from others."""


# These run over all rows of each step, so they are loops in C.
_name_of, _table_of = attrgetter("request_id"), attrgetter("block_table")
_places_of = attrgetter("start", "read_slot", "write_slots", "checkpoints")
_counts_of = attrgetter("num_drafts", "num_logits", "num_scored")
_tokens_of, _logprobs_of, _finish_of = attrgetter("token_ids"), attrgetter("logprobs"), attrgetter("finish_reason")


class RecordedEngine(Protocol):
    """The parts of an engine that a record needs."""

    plan: Plan
    scheduler: Scheduler
    output_processor: OutputProcessor

    @property
    def identity(self) -> JsonObject: ...


def schedule_facts(engine: RecordedEngine) -> JsonObject:
    """Return all numbers that the batches of an engine depend on, besides its requests and their tokens."""
    settings, memory, encoder = engine.plan.settings, engine.plan.memory, engine.plan.encoder
    return {
        **{name: getattr(settings, name) for name in SCHEDULE_SETTINGS},
        **asdict(engine.scheduler.limits),
        "num_blocks": memory.num_blocks,
        "num_slots": memory.num_slots,
        "num_packed": memory.num_packed,
        "num_window_blocks": memory.num_window_blocks,
        "slots_per_request": memory.slots_per_request,
        **{f"pins_{name}": value for name, value in asdict(engine.plan.pins).items()},
        "encoder_cells": None if encoder is None else encoder.num_cells,
    }


class StepLog(ABC):
    """Log of the events of an engine, in their order, as records of plain numbers.

    Outputs are numbered in the order in which they came. Clients and cache salts become digests.
    """

    def __init__(self, engine: RecordedEngine) -> None:
        self._engine = engine
        self._name_key = os.urandom(32)
        self._tables: list[tuple[int, ...]] = []
        self._tables_hash = 0
        plan = engine.plan
        self._has_more = bool(plan.memory.num_window_blocks or plan.encoder or plan.settings.overlap == "on")
        """True if rows have more than blocks and a slot."""
        self._begin()

    def _begin(self) -> None:
        self._outputs: dict[str, tuple[int, CompletionOutput]] = {}
        """Number and output of each output that steps in flight may still have, by the id in the scheduler."""
        self._num_outputs = 0
        self._ended: list[str] = []
        """Outputs that ended in the last step, or since then."""
        self._row_names: list[str] = []
        self._row_numbers: list[int] = []
        self._row_outputs: list[CompletionOutput] = []
        """Names, numbers and outputs of the rows of the last step in which each row gave one token."""
        self._last_time = time.perf_counter()

    @abstractmethod
    def add_request(self, head: RequestHead, snapshot: RequestSnapshot, parts: ByteParts) -> None:
        """Take a request that was added."""

    @abstractmethod
    def add_step(self, step: StepRecord) -> None:
        """Take a step that is over."""

    def add_plain_step(
        self, is_called: bool, ticks: int, drafts: int, batch_hash: int, numbers: list[int], tokens: list[int]
    ) -> None:
        """Take a step in which each row computed and gave one token."""
        rows = [RowRecord(number, 1, (token,)) for number, token in zip(numbers, tokens, strict=True)]
        self.add_step(StepRecord(is_called, False, ticks, drafts, batch_hash, 0, tuple(rows)))

    @abstractmethod
    def add_event(self, kind: PieceKind, request_id: str) -> None:
        """Take an event that has no more than an id."""

    @abstractmethod
    def note_gap(self, reason: str) -> None:
        """Note that the engine did something that no replay does."""

    @abstractmethod
    def close(self) -> None:
        """Note the end of the engine."""

    @abstractmethod
    def stats(self) -> JsonObject:
        """Return counts since the start."""

    def note(self, kind: PieceKind, request_id: str = "") -> None:
        """Note an event that has no more than an id. It is noted before it takes effect."""
        self.add_event(kind, request_id)
        state = self._engine.output_processor.request_states.get(request_id)
        if state is not None and kind is not PieceKind.PREEMPT:
            self._ended += [request.request_id for request in state.requests]

    def note_request(self, state: RequestState, *, has_media: bool = True, is_resumed: bool = False) -> None:
        """Note a request, with what it has generated so far. `is_resumed`: it was noted before."""
        for request, output in zip(state.requests, state.output.outputs, strict=True):
            self._outputs[request.request_id] = self._num_outputs, output
            self._num_outputs += 1
        first, parts = state.requests[0], ByteParts()
        snapshot = make_snapshot(state, {}, parts, has_media=has_media)
        hidden = replace(
            snapshot, prompt=None, client=self._name(snapshot.client), cache_salt=self._name(snapshot.cache_salt)
        )
        images = [] if has_media or state.media is None else [span.item.digest for span in state.media.spans]
        head = RequestHead(client_weight(first.client), first.was_imported, is_resumed, images, first.arrival)
        self.add_request(head, hidden, parts)

    def note_step(self, batch: Batch, updates: Sequence[RequestUpdate], *, is_called: bool, has_failed: bool) -> None:
        """Note a finished step. `is_called`: `EngineCore.step` finished it."""
        now = time.perf_counter()
        ticks, self._last_time = int(min((now - self._last_time) * 1e5, MAX_TICKS)), now
        drafts, batch_hash = self._engine.scheduler.num_drafts_asked, self._hash(batch)
        ended, self._ended = self._ended, []
        tokens = None if has_failed else self._plain_tokens(batch, updates)
        if tokens is not None:
            self.add_plain_step(is_called, ticks, drafts, batch_hash, self._row_numbers, tokens)
        else:
            self._row_names = []  # an id may be in use again
            rows, bits = self._rows(batch, updates)
            self.add_step(StepRecord(is_called, has_failed, ticks, drafts, batch_hash, bits, tuple(rows)))
        for name in ended:  # they ended a step ago, so no step in flight has them; an id may be in use again
            if name not in self._engine.output_processor.state_by_sample:
                self._outputs.pop(name, None)

    def _hash(self, batch: Batch) -> int:
        """Return a hash of a batch's places, blocks, slots and checkpoints.

        They are numbers, so that it is the same everywhere. Most steps have the block tables of the one before.
        """
        rows = batch.rows
        tables = list(map(_table_of, rows))
        if tables != self._tables:
            self._tables, self._tables_hash = tables, hash(tuple(tables))
        values = tuple(map(_places_of, rows))
        if batch.num_decode_rows == len(rows) and not batch.num_drafts:
            counts: tuple[object, ...] = ()
        else:
            counts = tuple([(len(row.token_ids), *_counts_of(row)) for row in rows])
        sizes = batch.num_decode_rows, batch.num_drafts
        if not self._has_more:
            return hash((sizes, self._tables_hash, values, counts))
        others = tuple([row.window_block_table for row in rows if row.window_block_table])
        ahead = tuple([row.previous_row for row in rows if row.previous_row is not None])
        cells = tuple([tuple(image.cells) for image in batch.images_to_encode])
        uses = tuple([(use.start, use.end, tuple(use.cells)) for row in rows if row.media for use in row.media])
        return hash((sizes, self._tables_hash, values, counts, others, ahead, cells, uses))

    def _plain_tokens(self, batch: Batch, updates: Sequence[RequestUpdate]) -> list[int] | None:
        """Return the tokens of a step in which every row gave one, and none ended; None for other steps."""
        rows = batch.rows
        if len(updates) != len(rows) or batch.num_decode_rows != len(rows):
            return None
        if any(map(_finish_of, updates)) or any(map(_logprobs_of, updates)):
            return None
        try:
            tokens = [token for (token,) in map(_tokens_of, updates)]
        except ValueError:  # of some row, not one
            return None
        names = list(map(_name_of, rows))
        if names != self._row_names:
            known = [self._outputs[name] for name in names]
            self._row_names = names
            self._row_numbers, self._row_outputs = [number for number, _ in known], [output for _, output in known]
        return None if any(map(_finish_of, self._row_outputs)) else tokens  # one may have a stop string

    def _rows(self, batch: Batch, updates: Sequence[RequestUpdate]) -> tuple[list[RowRecord], int]:
        """Return the rows of any step, and a hash of the log-probabilities in it, or 0."""
        update_of = {update.request_id: update for update in updates}
        rows, bits = list[RowRecord](), 0
        for row in batch.rows:
            number, output = self._outputs[row.request_id]
            update, computed = update_of.get(row.request_id), len(row.token_ids)
            if update is None:
                # A chunk that does not end its prompt gives nothing either.
                rows.append(RowRecord(number, computed, (), is_void=row.samples or output.finish_reason is not None))
                continue
            if update.logprobs or update.prompt_logprobs:
                bits = hash((bits, tuple(update.logprobs or ()), tuple(update.prompt_logprobs)))
            if output.finish_reason is None:
                rows.append(RowRecord(number, computed, update.token_ids))
            else:
                end = output.finish_reason
                rows.append(RowRecord(number, computed, update.token_ids, end, len(output.token_ids)))
                self._ended.append(row.request_id)
        return rows, bits

    def _name(self, name: str | None) -> str | None:
        """Return a digest in place of a name, the same for the same name. Its key is kept nowhere."""
        return None if name is None else hashlib.blake2b(name.encode(), digest_size=8, key=self._name_key).hexdigest()


@dataclass(frozen=True)
class _NewSegment:
    """Order to begin another segment, which follows the last one or not."""

    follows: bool


@dataclass(frozen=True)
class _Request:
    head: RequestHead
    snapshot: RequestSnapshot
    parts: ByteParts


class FlightRecorder(StepLog):
    """A log in files: a thread writes segments to a folder of its own, within the bytes of the directory.

    Nothing here waits for the thread. A thread that cannot write ends, which is logged once and counted, and requests
    notice nothing. If the thread falls behind, events are left out and counted, and another segment begins with the
    requests that are unfinished then.
    """

    def __init__(self, engine: RecordedEngine, config: EngineConfig) -> None:
        """Make the folder. ConfigError if it cannot be made."""
        assert config.record is not None, "there is a directory to write to"
        super().__init__(engine)
        self.counts = RecordCounts()
        self._pieces: deque[bytes | _Request | _NewSegment] = deque()
        self._encoder = StepEncoder()
        self._in_gap = False
        self._has_images = config.record_images
        plan = engine.plan
        given = {name: value for name, value in config.model_dump(mode="json").items() if config.is_given(name)}
        for name in ("record", "record_limit", "record_images"):
            given.pop(name, None)
        gaps = []
        if plan.cache_files is not None:
            gaps.append("cache_offload or cache_dir: prefixes may have come from files that the record does not have")
        self._writer = _Writer(
            expand(config.record),
            config.record_limit,
            RecordHead(0, False, "", given, schedule_facts(engine), engine.identity, plan.to_json(), gaps),
            self._pieces,
            self.counts,
        )
        self.folder = self._writer.folder
        self._pieces.append(_NewSegment(follows=False))
        self._writer.start()
        weakref.finalize(self, self._writer.end)  # the thread ends with an engine that nobody closes

    def note(self, kind: PieceKind, request_id: str = "") -> None:
        """Note an event, unless the record has failed."""
        if not self._is_over():
            super().note(kind, request_id)

    def note_request(self, state: RequestState, *, has_media: bool = True, is_resumed: bool = False) -> None:
        """Note a request, with its images if `record_images` says so."""
        if self._is_over():
            return
        try:
            super().note_request(state, has_media=has_media and self._has_images, is_resumed=is_resumed)
        except Exception as error:
            self._fail(error)

    def note_step(self, batch: Batch, updates: Sequence[RequestUpdate], *, is_called: bool, has_failed: bool) -> None:
        """Note a finished step; an error here is the record's, and no request's."""
        if self._is_over():
            return
        try:
            super().note_step(batch, updates, is_called=is_called, has_failed=has_failed)
        except Exception as error:
            self._fail(error)

    def _is_over(self) -> bool:
        """Return whether the record has failed, here or in its thread. Nothing is kept for it then."""
        if self.counts.failed and self._outputs:
            self._begin()
        return bool(self.counts.failed)

    def _fail(self, error: Exception) -> None:
        self.counts.failed = 1
        log.error("the record in %s ends here: %r", self.folder, error, exc_info=error)

    def add_request(self, head: RequestHead, snapshot: RequestSnapshot, parts: ByteParts) -> None:
        self.counts.requests += 1
        self._put(_Request(head, snapshot, parts))

    def add_plain_step(
        self, is_called: bool, ticks: int, drafts: int, batch_hash: int, numbers: list[int], tokens: list[int]
    ) -> None:
        self._put_step(self._encoder.encode_plain(is_called, ticks, drafts, batch_hash, numbers, tokens))

    def add_step(self, step: StepRecord) -> None:
        self._put_step(self._encoder.encode(step))

    def _put_step(self, encoded: bytes) -> None:
        self.counts.steps += 1
        self._put(pack_piece(PieceKind.STEP, encoded))
        if self._writer.is_full or (self._in_gap and len(self._pieces) < MAX_PIECES // 2):
            self._begin_segment()

    def add_event(self, kind: PieceKind, request_id: str) -> None:
        self._put(pack_piece(kind, request_id.encode()))

    def note_gap(self, reason: str) -> None:
        log.warning("the record in %s has a gap: %s", self.folder, reason)
        self._in_gap = True
        self.counts.gaps += 1

    def close(self) -> None:
        self._put(pack_piece(PieceKind.END))
        self._writer.close()

    def stats(self) -> JsonObject:
        return {**asdict(self.counts), "folder": str(self.folder)}

    def _put(self, piece: bytes | _Request) -> None:
        if self._in_gap or self.counts.failed:
            self.counts.lost += 1
        elif len(self._pieces) < MAX_PIECES:
            self._pieces.append(piece)
        else:
            self.note_gap(f"its writer is {MAX_PIECES:,} events behind")

    def _begin_segment(self) -> None:
        """Begin another segment, with all unfinished requests and what they have generated."""
        if self.counts.failed:
            return
        follows, self._in_gap, self._writer.is_full = not self._in_gap, False, False
        self._pieces.append(_NewSegment(follows))
        self._encoder = StepEncoder()
        self._begin()
        for state in self._engine.output_processor.request_states.values():
            self.note_request(state, is_resumed=True)


class _Writer(threading.Thread):
    """Thread that writes pieces to segments. Files are for their owner alone."""

    def __init__(
        self,
        directory: Path,
        limit: int,
        head: RecordHead,
        pieces: deque[bytes | _Request | _NewSegment],
        counts: RecordCounts,
    ) -> None:
        super().__init__(name="ostinato-record", daemon=True)
        self._directory, self._limit, self._head = directory, limit, head
        self._pieces, self._counts = pieces, counts
        self.is_full = False
        """True if the segment has its bytes, until the recorder begins another one."""
        self._ends = threading.Event()
        self.end = self._ends.set
        """Function after which the thread writes what waits, and ends."""
        self._file: int | None = None
        self._blocks = BlockWriter()
        self._number = self._size = 0
        self._path = directory
        self.folder = self._make_folder()

    def _make_folder(self) -> Path:
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = len(matches(self._directory, f"{name}*"))
            folder = self._directory / (f"{name}-{number}" if number else name)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"record {self._directory}: no folder can be made there: {os_error_text(error)}"
            ) from None
        return folder

    def close(self) -> None:
        """Write what waits, and end."""
        self.end()
        self.join()

    def run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._ends.wait(PERIOD)
                self._write_pending()
        except Exception as error:  # whatever it is, the engine goes on
            self._counts.failed = 1
            self._pieces.clear()
            log.error("the record in %s ends here, it cannot be written: %s", self.folder, os_error_text(error))
            self._repair()
        finally:
            if self._file is not None:
                _unlock_and_close(self._file)

    def _write_pending(self) -> None:
        block: list[bytes] = []
        size = 0
        while self._pieces:
            piece = self._pieces.popleft()
            if isinstance(piece, _NewSegment):
                self._write_block(block)
                block, size = [self._open_segment(piece.follows)], 0
                continue
            if isinstance(piece, _Request):
                piece = pack_request(piece.head, pack_snapshot(piece.snapshot, piece.parts.parts))
            block.append(piece)
            size += len(piece)
            if size > BLOCK_BYTES:
                self._write_block(block)
                block, size = [], 0
        self._write_block(block)

    def _write_block(self, block: list[bytes]) -> None:
        if block:
            self._write(self._blocks.block(block))
            if self._size > self._limit // SEGMENTS:
                self.is_full = True

    def _write(self, data: bytes) -> None:
        assert self._file is not None, "the first order is to begin a segment"
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(data)
        self._counts.bytes += len(data)

    def _open_segment(self, follows: bool) -> bytes:
        """Open the next segment, and return its head."""
        self._path = self.folder / f"{self._number:06}{SUFFIX}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
        last, self._file = self._file, os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)  # before it begins like a segment, so nobody removes it
        self._blocks, self._size = BlockWriter(), 0
        if last is not None:
            _unlock_and_close(last)
        self._make_room()
        self._write(MAGIC)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = replace(self._head, number=self._number, follows=follows, created=now)
        self._number += 1
        self._counts.segments += 1
        return pack_head(head)

    def _make_room(self) -> None:
        """Remove the oldest segments of all runs, so that another one fits; not those that are being written."""
        files = list[tuple[os.stat_result, Path]]()
        for folder in matches(self._directory, "*"):
            for path in segments_of(folder) if _RUN.fullmatch(folder.name) else ():
                with suppress(OSError):  # another process may have removed it
                    if is_segment(path):
                        files.append((path.stat(), path))
        files.sort(key=lambda file: file[0].st_mtime_ns)
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in files:
            if total + self._limit // SEGMENTS <= self._limit:
                return
            if not _remove(path):
                continue
            with suppress(OSError):  # it holds younger segments, at least the one just opened if it is this run's
                path.parent.rmdir()
            total -= stat.st_size

    def _repair(self) -> None:
        """Cut off a block that was written in part."""
        if self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)


def _unlock_and_close(file: int) -> None:
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)  # closing it is not enough if a forked process has it too
    os.close(file)


def _remove(path: Path) -> bool:
    """Remove a segment, unless an engine is writing it; return whether it is gone."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: the limit goes first
    finally:
        os.close(file)
    path.unlink(missing_ok=True)
    return True
