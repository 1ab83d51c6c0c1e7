"""A record as it is read: the events of a run, and the outputs that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import error as StructError
from typing import NamedTuple

from pydantic import ValidationError

from ostinato.engine.flight.record_files import (
    PieceKind,
    RecordHead,
    RequestHead,
    RowRecord,
    StepDecoder,
    StepRecord,
    find_run,
    read_head,
    read_pieces,
    segments_of,
    unpack_request,
)
from ostinato.engine.migration.wire_format import RequestSnapshot, unpack_snapshot
from ostinato.errors import DamagedRecord, MoveError, RecordError, TruncatedRecord


class RecordEvent(NamedTuple):
    """One event of a record: what its piece holds, by kind."""

    kind: PieceKind
    request_id: str = ""
    step: StepRecord | None = None
    head: RequestHead | None = None
    snapshot: bytes = b""


class Record:
    """A run's segments from one on, up to the first gap."""

    def __init__(self, path: Path, first: int | None = None) -> None:
        """Look at the segments of a run. RecordError if there are none, or none has the number `first`."""
        self.folder = find_run(path)
        paths = segments_of(self.folder)
        numbers = [int(each.stem) if each.stem.isdecimal() else -1 for each in paths]
        if first is not None and first not in numbers:
            raise RecordError(f"{self.folder} has no segment {first}; it has {', '.join(map(str, numbers))}")
        begin = 0 if first is None else numbers.index(first)
        self.paths = paths[begin:]
        self.head: RecordHead = read_head(self.paths[0])
        self.notes: list[str] = []
        """Sentences on what is missing at the end."""

    def events(self) -> Iterator[RecordEvent]:
        """Yield the events. DamagedRecord where a file is damaged; one that ends within a block is a note."""
        self.notes = []
        number = self.head.number
        for path in self.paths:
            is_last = path == self.paths[-1]
            try:
                pieces = read_pieces(path)
                head = read_head(path)
                next(pieces)
                if path != self.paths[0] and (not head.follows or head.number != number + 1):
                    self.notes.append(f"there is a gap before {path.name}: replay it with --segment {head.number}")
                    return
                number = head.number
                yield RecordEvent(PieceKind.HEAD)
                decoder = StepDecoder()
                for kind, payload in pieces:
                    yield _event(kind, payload, decoder, path)
            except TruncatedRecord as error:
                if not is_last:
                    raise
                self.notes.append(error.message)


def _event(kind: PieceKind, payload: bytes, decoder: StepDecoder, path: Path) -> RecordEvent:
    try:
        if kind is PieceKind.STEP:
            return RecordEvent(kind, step=decoder.decode(payload))
        if kind is PieceKind.REQUEST:
            head, snapshot = unpack_request(payload)
            return RecordEvent(kind, unpack_snapshot(snapshot)[0].request_id, head=head, snapshot=snapshot)
        return RecordEvent(kind, payload.decode())
    except (ValueError, IndexError, StructError, ValidationError, MoveError) as error:
        raise DamagedRecord(f"{path} has a {kind.name.lower()} that does not add up: {error}") from None


@dataclass
class OutputTrace:
    """Tokens of one output, in the record or in the replay."""

    request_id: str
    index: int
    serial: int
    """Number of the request, among all."""
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Step of each token."""
    end: str | None = None
    visible: int | None = None

    @property
    def name(self) -> str:
        return f"request {self.request_id}, output {self.index}"


class Traces:
    """Outputs of all requests, followed through the steps by their numbers."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, int], OutputTrace] = {}
        """Output by the request's serial number and its own index."""
        self._by_number: list[OutputTrace] = []
        self._serials: dict[str, int] = {}
        self.num_requests = 0

    def begin_segment(self) -> None:
        self._by_number = []

    def add_request(self, snapshot: RequestSnapshot, *, is_resumed: bool) -> None:
        """Add a request; one that is resumed keeps the outputs that it has, if it was there before."""
        if not (is_resumed and snapshot.request_id in self._serials):
            self._serials[snapshot.request_id] = self.num_requests
            self.num_requests += 1
        serial = self._serials[snapshot.request_id]
        for index, sample in enumerate(snapshot.samples):
            made = OutputTrace(snapshot.request_id, index, serial, [*sample.token_ids], [-1] * len(sample.token_ids))
            self._by_number.append(self.outputs.setdefault((serial, index), made))

    def add_step(self, step: StepRecord, number: int) -> None:
        for row in step.rows:
            trace = self.of(row)
            trace.tokens += row.token_ids
            trace.steps += [number] * len(row.token_ids)
            if row.end is not None:
                trace.end, trace.visible = row.end, row.visible

    def of(self, row: RowRecord) -> OutputTrace:
        if row.number >= len(self._by_number):
            raise DamagedRecord(f"a step has output {row.number}, and {len(self._by_number)} have come")
        return self._by_number[row.number]

    def of_request(self, request_id: str) -> list[OutputTrace]:
        """Return the outputs of the last request of an id."""
        serial = self._serials.get(request_id, -1)
        return [trace for (number, _), trace in self.outputs.items() if number == serial]
