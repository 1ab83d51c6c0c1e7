"""What a server and its engine's process tell each other, and how it passes: as pickles, each after its length."""

from __future__ import annotations

import os
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
from ostinato.observe.counts import Meter
from ostinato.plan.model import VisionSpec
from ostinato.plan.plan import Plan
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.run.runner import StartProgress

Question = Literal["observe", "check"]
"""`observe`: an Observation. `check`: for how many requests anything is kept; AssertionError if the bookkeeping is in
disorder."""

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


class Reply(NamedTuple):
    """The answer to a Submit (whose id it bears), a Compile or an Ask: a result, or the error that was raised."""

    call_id: str
    result: Any = None
    error: Exception | None = None


class Gained(NamedTuple):
    """What requests have gained since the last time."""

    deltas: Sequence[OutputDelta]


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

    def end_with_peer(self) -> None:
        """Ends this process at once when the other end is gone, whatever it is doing."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._connection, 0)  # reports only that the connection ended
            poll.poll()
            os._exit(0)

        threading.Thread(target=watch, name="server's end", daemon=True).start()
