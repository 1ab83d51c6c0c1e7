"""Messages between a server and its engine's process: pickles, each after its length, and the errors in them."""

from __future__ import annotations

import pickle
import select
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ostinato.config import EngineConfig
from ostinato.engine.process.output_deltas import OutputDelta
from ostinato.errors import EngineError, OstinatoError, StepFailed
from ostinato.json_io import JsonObject
from ostinato.kv_cache.cache_events import CacheEvent
from ostinato.kv_cache.marks import Mark
from ostinato.media.media_prompt import MediaPrompt
from ostinato.observe.counts import EngineHistograms, ProgressFn
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.plan import Plan
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import PoolingKind

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore

QueryKind = Literal["observe", "hits", "prefixes", "reset", "check", "publish", "close"]
"""Questions to the engine.

`observe`: a StatsSnapshot. `hits`: the block hashes at which a prompt may hit (`prefix_hit_keys`), or None if they have
not changed since the last time. `prefixes`: a picture of the prefix index (`cache.picture`). `check`: for how many
requests anything is kept; AssertionError if the bookkeeping is inconsistent. `publish`: nothing, but CacheEvents from
now on, the present contents first. `close`: nothing, once the prefix cache is
saved to files, if the plan says so.
"""

# Messages to the engine.


MakeEngine: TypeAlias = "Callable[[EngineConfig, ProgressFn], EngineCore]"


@dataclass(frozen=True)
class EngineStart:
    """The first message."""

    config: EngineConfig
    make: MakeEngine
    """Function that makes the engine. It is sent by its name, or by its class's."""
    log_level: int


class SubmitRequest(NamedTuple):
    """A request; its answer is an EngineReply. See `EngineCore.add_request`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    media: MediaPrompt | None = None
    client: str | None = None
    pooling: PoolingKind | None = None
    final_only: bool = False
    """True if its output is sent once, when it has ended."""
    arrival: float | None = None
    """Moment of its arrival at the server, on this machine's monotonic clock; None if it arrives with the message."""
    marks: tuple[Mark, ...] = ()


class ImportRequest(NamedTuple):
    """A request that another engine has exported; its answer is an EngineReply. See `EngineCore.import_request`."""

    request_id: str
    exported: bytes
    guide: Guide | None
    """Guide of the request, to be compiled before it continues."""
    final_only: bool = False
    """True if its output is sent once, when it has ended."""


class ExportRequest(NamedTuple):
    """A request to export; its answer is a RequestExported, then its last delta, whose outputs end with `moved`."""

    call_id: str
    request_id: str


class AbortRequest(NamedTuple):
    """An abandoned request, to be dropped."""

    request_id: str


class DeltasHandled(NamedTuple):
    """Note that the readers have the last deltas, which took the event loop `cost` seconds."""

    cost: float


class CompileGuide(NamedTuple):
    """A guide to compile, so that it is known whether that is possible; its answer is an EngineReply."""

    call_id: str
    guide: Guide


class Query(NamedTuple):
    """A question to the engine, between two steps; its answer is an EngineReply."""

    call_id: str
    question: QueryKind


# Messages from the engine.


class ProgressReport(NamedTuple):
    """Progress of the start; see `ProgressFn`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class EngineStarted:
    """First report of an engine that has succeeded in a step."""

    plan: Plan
    directory: Path
    """Directory of the checkpoint."""
    default_params: SamplingParams
    vocab_size: int
    """Vocabulary size of the model, which may be padded."""
    vision: VisionSpec | None
    """Image encoder of the model, if it has one."""
    hidden_size: int


class EngineReply(NamedTuple):
    """The answer to a SubmitRequest or an ImportRequest (under its id), a CompileGuide or a Query.

    It is a result, or the error that was raised.
    """

    call_id: str
    result: Any = None
    error: Exception | None = None


class RequestExported(NamedTuple):
    """The answer to an ExportRequest; `exported` is None if the request has ended by itself."""

    call_id: str
    request_id: str
    exported: bytes | None


class OutputDeltas(NamedTuple):
    """Output deltas of requests since the last such message."""

    deltas: Sequence[OutputDelta]


class CacheEvents(NamedTuple):
    """Events of the prefix index since the last such message."""

    events: list[CacheEvent]


class RequestFailed(NamedTuple):
    """A request that has ended with an error that its engine did not report."""

    request_id: str
    error: Exception


class LogLine(NamedTuple):
    """A line for the server's log."""

    record: LogRecord


class EngineCrashed(NamedTuple):
    """The last message: why the engine cannot start, or cannot continue."""

    error: Exception


@dataclass(frozen=True)
class StatsSnapshot:
    """The engine's counts between two steps, so that all agree with each other."""

    stats: JsonObject
    """Statistics of `EngineCore.stats`."""
    meter: EngineHistograms


def picklable_error(error: BaseException) -> Exception:
    """Return an error that another process can read: Ostinato's own unchanged, any other as text."""
    if isinstance(error, OstinatoError):
        return error
    picklable = EngineError(f"{type(error).__name__}: {error}")
    picklable.add_note("".join(traceback.format_exception(error)).rstrip())
    return picklable


def step_error(error: Exception) -> Exception:
    """Return the error of one request. An exception of a step ends many requests, so each gets a separate error."""
    if isinstance(error, OstinatoError):
        return error
    return StepFailed(f"the step that computed the request failed: {type(error).__name__}: {error}")


# Transport.

_LENGTH_BYTES = 8

_AT_ONCE = 2**18
"""Bytes read at a time."""


def encode_message(message: object) -> bytes:
    """Return a message as the bytes that are sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class MessageDecoder:
    """Decoder of messages from bytes, however these are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[object]:
        """Add received bytes; yield the messages that they complete."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
            if len(self._bytes) < end:
                return
            with memoryview(self._bytes) as view:
                message = pickle.loads(view[_LENGTH_BYTES:end])
            del self._bytes[:end]
            yield message


class Channel:
    """The engine's end of the connection, a stream socket. It receives between steps, and sends from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = MessageDecoder()
        self._sending = threading.Lock()

    def send(self, *messages: object) -> None:
        """Send messages. Waits while the other end has not read earlier ones. OSError if it is gone."""
        data = b"".join(map(encode_message, messages))
        with self._sending:
            self._connection.sendall(data)

    def receive(self, patience: float | None) -> list[Any]:
        """Return the messages that have come.

        Waits `patience` seconds for the first one; without a limit if that is None. EOFError if the other end is gone.
        """
        if patience != 0:
            select.select([self._connection], [], [], patience)
        messages: list[object] = []
        while True:
            try:
                # This never waits, since steps are in between, and a waiting thread would contend for the GIL.
                data = self._connection.recv(_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the server is gone")
            messages += self._unpacker.feed(data)
            if len(data) < _AT_ONCE:
                return messages
