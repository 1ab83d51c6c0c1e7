"""What a server and its engine's process tell each other, and how it passes: as pickles, each after its length."""

from __future__ import annotations

import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging import LogRecord
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ostinato.config import EngineConfig
from ostinato.engine.process.delivery import OutputDelta
from ostinato.media.prompt import MediaPrompt
from ostinato.models.pooling import PoolingKind
from ostinato.observe.histograms import Meter
from ostinato.plan.plan import Plan
from ostinato.plan.vision import VisionSpec
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.run.runner import StartProgress

Question = Literal["observe", "hits", "prefixes", "check", "close"]
"""`observe`: an Observation. `hits`: the chain hashes at which a prompt may hit (`hit_keys`), or None if they are those
of the last time. `prefixes`: a picture of the prefix index (`cache.picture`). `check`: for how many requests anything
is kept; AssertionError if the bookkeeping is in disorder. `close`: nothing, once what the prefix cache has is in files,
if the plan says so."""

# To the engine.


@dataclass(frozen=True)
class Start:
    """The first message."""

    config: EngineConfig
    make: Callable[[EngineConfig, StartProgress], Engine]
    """Makes the engine. Sent by its name, or by its class's."""
    log_level: int


class Submit(NamedTuple):
    """A request; its answer is a Reply. See `Engine.add`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    media: MediaPrompt | None = None
    client: str | None = None
    pooling: PoolingKind | None = None
    whole: bool = False
    """Whether its gains are sent once it has ended."""


class Import(NamedTuple):
    """A request that another engine has exported; its answer is a Reply. See `Engine.import_request`."""

    request_id: str
    exported: bytes
    guide: Guide | None
    """Its own, to be compiled before it goes on."""
    whole: bool = False
    """See `Submit.whole`."""


class Export(NamedTuple):
    """Another engine goes on with the request; its answer is an Exported, and behind that its last gain, whose outputs
    end with `moved`."""

    call_id: str
    request_id: str


class Abort(NamedTuple):
    """Nobody waits for the request any more."""

    request_id: str


class Settled(NamedTuple):
    """The last gains are with those who wait for them, which took the event loop `cost` seconds."""

    cost: float


class Compile(NamedTuple):
    """Compiles a guide, so that it is known whether that can be done; its answer is a Reply."""

    call_id: str
    guide: Guide


class Ask(NamedTuple):
    """A question to the engine, between two steps; its answer is a Reply."""

    call_id: str
    question: Question


# From the engine.


class Progress(NamedTuple):
    """What is being done at the start; see StartProgress."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Started:
    """The engine has succeeded in a step."""

    plan: Plan
    directory: Path
    """The checkpoint's."""
    default_params: SamplingParams
    vocab_size: int
    """The model's, which may be padded."""
    vision: VisionSpec | None
    """Its encoder of images, if it has one."""
    hidden_size: int


class Reply(NamedTuple):
    """The answer to a Submit (whose id it bears), a Compile or an Ask: a result, or the error that was raised."""

    call_id: str
    result: Any = None
    error: Exception | None = None


class Exported(NamedTuple):
    """The answer to an Export; None if the request has ended by itself."""

    call_id: str
    request_id: str
    exported: bytes | None


class Gained(NamedTuple):
    """What requests have gained since the last time."""

    deltas: Sequence[OutputDelta]


class Ended(NamedTuple):
    """A request has ended with an error that its engine did not tell of."""

    request_id: str
    error: Exception


class Log(NamedTuple):
    """A line for the server's log."""

    record: LogRecord


class Failed(NamedTuple):
    """The last message: why the engine cannot start, or not go on."""

    error: Exception


@dataclass(frozen=True)
class Observation:
    """The engine's counts between two steps, so that all agree with each other."""

    stats: dict[str, Any]
    """See `Engine.stats`."""
    meter: Meter


# How it passes.

_LENGTH_BYTES = 8

_AT_ONCE = 2**18
"""Bytes read at a time."""


def pack(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Unpacker:
    """Messages out of bytes, however these are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        """Takes bytes in; yields the messages that are complete with them."""
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
        self._unpacker = Unpacker()
        self._sending = threading.Lock()

    def send(self, *messages: Any) -> None:
        """Sends messages. Waits while the other end has not read earlier ones. OSError if it is gone."""
        data = b"".join(map(pack, messages))
        with self._sending:
            self._connection.sendall(data)

    def receive(self, patience: float | None) -> list[Any]:
        """The messages that have come. Waits `patience` seconds for the first one; None: as long as it takes.
        EOFError if the other end is gone."""
        if patience != 0:
            select.select([self._connection], [], [], patience)
        messages: list[Any] = []
        while True:
            try:
                # Without waiting, between two steps: a thread that waits would take the interpreter's lock.
                data = self._connection.recv(_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the server is gone")
            messages += self._unpacker.feed(data)
            if len(data) < _AT_ONCE:
                return messages
