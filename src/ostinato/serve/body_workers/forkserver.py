"""The process that workers are forked from: it has loaded all that they need, so that a new one costs milliseconds.

`python -m ostinato.serve.body_workers.forkserver FD` serves the server at the other end of the socket FD. For each
descriptor of a socket that comes, it forks a worker, which serves jobs from there until that socket is closed: also in
the middle of a job.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ostinato.child_process import die_with_parent, limit_memory
from ostinato.engine.process.engine_messages import MessageDecoder, encode_message
from ostinato.errors import OstinatoError
from ostinato.sampling.grammar import STACK_BYTES
from ostinato.serve.body_workers.context import RequestContext, WorkerContext
from ostinato.serve.body_workers.json_complexity import check_shape
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.json_bodies import Body, read_body

_AT_ONCE = 2**18
"""Bytes read at a time."""


class BodyJob(NamedTuple):
    """A body to be read; `length` bytes of it follow."""

    kind: type[Body]
    length: int


@dataclass(frozen=True)
class BodyResult:
    """Answer to a BodyJob: the slim body, and what was prepared; or an error."""

    body: Body | None = None
    prepared: object = None
    error: Exception | None = None
    pixels: int = 0
    """Pixels of images that were decoded for the job."""


def main(descriptor: int) -> None:
    """Load the context in the first message, and fork workers until the server is gone."""
    die_with_parent()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # these signals are for the server only
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are not waited for
    # The server has logged the messages about the model already.
    logging.getLogger("ostinato").addHandler(logging.NullHandler())
    server = socket.socket(fileno=descriptor)
    try:
        context: WorkerContext = _message(server)
    except EOFError:
        return
    try:
        request_context = context.request_context()
    except Exception as error:
        server.sendall(encode_message(RuntimeError(f"{type(error).__name__}: {error}")))
        return
    gc.collect()
    gc.freeze()
    server.sendall(encode_message(None))
    while True:
        said, descriptors, _, _ = socket.recv_fds(server, 1, 1)
        if not said:
            return
        with suppress(OSError):  # without a worker the connection ends, which the server notices
            if os.fork() == 0:
                server.close()
                try:
                    _serve(socket.socket(fileno=descriptors[0]), request_context)
                finally:
                    os._exit(0)
        os.close(descriptors[0])


def _serve(connection: socket.socket, context: RequestContext) -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it waits for the forks that render templates
    memory = context.settings.worker_memory
    limit_memory(memory, memory + STACK_BYTES)  # a guide is tried with a stack of its own
    while True:
        try:
            job: BodyJob = _message(connection)
            sent = _exactly(connection, job.length)
        except (EOFError, OSError):
            return
        _end_with_peer(connection, True)
        answer = encode_message(_done(context, job.kind, bytes(sent)))
        _end_with_peer(connection, False)
        connection.sendall(answer)


def _done(context: RequestContext, kind: type[Body], sent: bytes) -> BodyResult:
    before = _pixels(context)
    read, prepared = None, None
    failure: Exception | None = None
    try:
        check_shape(sent, context.settings)
        body, prepared = read_body(kind, sent, context, context.settings.unknown_fields)
        read = body.without_prepared_fields()
    except (ApiError, OstinatoError) as error:
        failure = error
    except MemoryError:
        most = context.settings.worker_memory
        message = f"reading the request takes more than {most} bytes of memory (worker_memory); make it smaller"
        failure = ApiError(400, message, code="too_costly")
    except Exception as error:
        # Sent as text, since the error itself may not be picklable.
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    return BodyResult(read, prepared, failure, _pixels(context) - before)


def _pixels(context: RequestContext) -> int:
    """Return the pixels of all images that were decoded here."""
    return 0 if context.text.media is None else context.text.media.sources.meter.count


def _end_with_peer(connection: socket.socket, ends: bool) -> None:
    """Have the kernel kill this process when the connection closes, even within a call into C, or stop doing so."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    if not ends:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(connection, 0)
    if poll.poll(0):  # it ended before
        os._exit(0)


def _message(connection: socket.socket) -> Any:
    """Return the next message. Bytes that follow it are not read."""
    unpacker = MessageDecoder()
    size = _exactly(connection, 8)
    messages = list(unpacker.feed(bytes(size) + _exactly(connection, int.from_bytes(size, "little"))))
    return messages[0]


def _exactly(connection: socket.socket, count: int) -> bytearray:
    """Read `count` bytes. EOFError if they do not come."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(_AT_ONCE, count - len(data)))
        if not piece:
            raise EOFError("the server is gone")
        data += piece
    return data


if __name__ == "__main__":
    # Import it under its own name, since messages name its classes by that.
    from ostinato.serve.body_workers import forkserver

    forkserver.main(int(sys.argv[1]))
