"""Responses that follow a request in the engine, and end it when the client leaves.

Answers that may be as large as what a client sent are sent piece by piece, since a copy of all of it would hold the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.engine.process.engine_errors import EngineFailed, ReplicaLost, StepFailed
from ostinato.errors import OstinatoError
from ostinato.observe.request_record import RequestRecord
from ostinato.serve.http.api_errors import Dialect, as_api_error

PIECE = 2**18
"""Bytes that are written at once."""


def chunks_of(data: bytes) -> list[bytes]:
    """Return `data` in pieces."""
    return [data[begin : begin + PIECE] for begin in range(0, len(data), PIECE)]


def coalesce(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of at most PIECE bytes; a longer part is one piece."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        if waiting and size + len(part) > PIECE:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(part)
        size += len(part)
    if waiting:
        yield b"".join(waiting)


class ChunkedJson(Response):
    """JSON response in pieces; each is written when the client has taken the one before."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.pieces = pieces
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_of(response: Response) -> bytes:
    """Return the whole body, for callers that a pause does not hurt."""
    return b"".join(response.pieces) if isinstance(response, ChunkedJson) else bytes(response.body)


T = TypeVar("T")

log = logging.getLogger("ostinato.serve")

DONE = b"data: [DONE]\n\n"
"""End of a stream in OpenAI's form."""


class LastEvents(bytes):
    """End of a stream of events. It is sent with the end of the answer, which saves a message."""


class ClientDisconnected(Exception):
    """Raised if the client closed its connection before the answer was complete."""


class EventStream(Response):
    """Response that sends events as they come.

    `close` is always called at the end, even if the client leaves before the first event. `events` may end with
    LastEvents. An error is sent as an event, since the status has been sent already. A client that reads slowly delays
    its own events, not the engine. One that stops reading loses its connection (`Connection`).
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # The timeout begins without a deadline: it gets one when the client leaves.
            async with asyncio.timeout(None) as sending:
                leaving = asyncio.create_task(_end_when_left(receive, sending))
                try:
                    await self._send(send, scope["state"]["record"], scope["state"]["dialect"])
                finally:
                    leaving.cancel()
        except TimeoutError:
            raise ClientDisconnected from None
        finally:
            self._close()
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()

    async def _send(self, send: Send, record: RequestRecord, dialect: Dialect) -> None:
        async def send_some(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": not isinstance(data, LastEvents)})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send_some(data)
                if isinstance(data, LastEvents):
                    return
        except Exception as error:
            answer = as_api_error(error)
            record.error = answer.code or type(error).__name__
            if answer.status >= 500:
                log_failure(record.request_id, error)
            await send_some(LastEvents(answer.event(dialect) + (b"" if dialect == "anthropic" else DONE)))
        else:
            await send_some(LastEvents(b""))


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client closes its connection, cancel `work` and raise ClientDisconnected."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_leaves(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        # Their errors refer back to this frame through tracebacks, so neither would be freed at once.
        del working, leaving


def log_failure(request_id: str, error: Exception) -> None:
    """Log an error that is the server's fault, with a traceback unless the engine has logged one."""
    is_known = isinstance(error, (OstinatoError, StepFailed, EngineFailed, ReplicaLost))
    log.error("request %s failed: %s", request_id, error, exc_info=None if is_known else error)


async def _end_when_left(receive: Receive, sending: asyncio.Timeout) -> None:
    await _leaves(receive)
    sending.reschedule(asyncio.get_running_loop().time())


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def side_by_side(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines until they have ended.

    The first error is raised unchanged, once the others were cancelled and have ended.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
