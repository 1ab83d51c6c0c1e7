"""Responses that follow a request in the engine, and end it when the client leaves.

Answers that may be as large as what a client sent are sent piece by piece, since a copy of all of it would hold the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.errors import EngineFailed, OstinatoError, ReplicaLost, StepFailed
from ostinato.observe.request_record import RequestRecord
from ostinato.serve.http.api_errors import Dialect, as_api_error

PIECE = 2**18
"""Bytes that are written at once."""


def chunks_of(data: bytes) -> list[bytes]:
    """Return `data` in pieces."""
    return [data[begin : begin + PIECE] for begin in range(0, len(data), PIECE)]


_FIRST_SLICE = 2**11
_SLICE = 2**13
"""Bytes of JSON that are made at once: a few milliseconds, if each of their tokens is looked up for the first time."""


class LoopSlices:
    """Slices of the event loop's time for making long answers: one of one answer in each iteration of the loop.

    A short answer, or a stream's next tokens, needs no slice.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def pieces(self, parts: Iterable[str | bytes]) -> AsyncGenerator[bytes]:
        """Yield the parts, which are made as they are read, in pieces of about PIECE bytes; at least one piece."""
        iterator, waiting, is_first = iter(parts), bytearray(), True
        while True:
            if is_first:
                is_over = _extend(waiting, iterator, _FIRST_SLICE)
            else:
                async with self._lock:
                    is_over = _extend(waiting, iterator, _SLICE)
                    await asyncio.sleep(0)
            if is_over:
                yield bytes(waiting)
                return
            if len(waiting) >= PIECE:
                yield bytes(waiting)
                waiting.clear()
            is_first = False


def _extend(waiting: bytearray, parts: Iterator[str | bytes], num_bytes: int) -> bool:
    """Add parts of that many bytes, or a little more; return whether no part is left."""
    end = len(waiting) + num_bytes
    for part in parts:
        waiting += part.encode() if isinstance(part, str) else part
        if len(waiting) >= end:
            return False
    return True


class ChunkedJson(Response):
    """JSON response in pieces, each made and written once the last was taken; `close` is always called."""

    def __init__(self, pieces: AsyncGenerator[bytes], close: Callable[[], None]) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self.pieces, self._close = pieces, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            async with _until_left(receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for piece in self.pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.pieces.aclose()
            self._close()


async def body_of(response: Response) -> bytes:
    """Return the whole body, for callers that need no pieces."""
    if not isinstance(response, ChunkedJson):
        return bytes(response.body)
    return b"".join([piece async for piece in response.pieces])


T = TypeVar("T")

log = logging.getLogger("ostinato.serve")

DONE = b"data: [DONE]\n\n"
"""End of a stream in OpenAI's form."""
EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"
"""Media type of a stream in Ollama's form: a JSON object in each line."""


class LastEvents(bytes):
    """End of a stream of events. It is sent with the end of the answer, which saves a message."""


class ClientDisconnected(Exception):
    """Raised if the client closed its connection before the answer was complete."""


class EventStream(Response):
    """Response that sends events as they come.

    `close` is always called at the end, even if the client leaves before the first event. `events` may end with
    LastEvents. An error is sent as an event, since the status has been sent already. A client that reads slowly delays
    its own events, not the engine. One that stops reading loses its connection (`HttpConnection`).
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], media_type: str = EVENTS) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _until_left(receive):
                await self._send(send, scope["state"]["record"], scope["state"]["dialect"])
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
            await send_some(LastEvents(answer.event(dialect) + (DONE if dialect == "openai" else b"")))
        else:
            await send_some(LastEvents(b""))


async def cancel_on_disconnect(request: Request, work: Coroutine[object, object, T]) -> T:
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


@asynccontextmanager
async def _until_left(receive: Receive) -> AsyncIterator[None]:
    """Raise ClientDisconnected inside when the client leaves."""
    try:
        # The timeout begins without a deadline: it gets one when the client leaves.
        async with asyncio.timeout(None) as sending:
            leaving = asyncio.create_task(_end_when_left(receive, sending))
            try:
                yield
            finally:
                leaving.cancel()
    except TimeoutError:
        raise ClientDisconnected from None


async def _end_when_left(receive: Receive, sending: asyncio.Timeout) -> None:
    await _leaves(receive)
    sending.reschedule(asyncio.get_running_loop().time())


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def side_by_side(work: Iterable[Coroutine[object, object, None]]) -> None:
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
