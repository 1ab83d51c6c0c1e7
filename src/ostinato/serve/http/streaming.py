"""Responses that follow a request in the engine, and end it when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.engine.process.failures import EngineFailed, ReplicaLost, StepFailed
from ostinato.errors import OstinatoError
from ostinato.observe.record import RequestRecord
from ostinato.serve.http.errors import as_api_error, is_anthropic

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
                    await self._send(send, scope["state"]["record"], scope["path"])
                finally:
                    leaving.cancel()
        except TimeoutError:
            raise ClientDisconnected from None
        finally:
            self._close()
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()

    async def _send(self, send: Send, record: RequestRecord, path: str) -> None:
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
            await send_some(LastEvents(answer.event(path) + (b"" if is_anthropic(path) else DONE)))
        else:
            await send_some(LastEvents(b""))


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client closes its connection, cancel `work` and raise ClientGone."""
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
