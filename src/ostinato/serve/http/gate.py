"""What every request passes before an endpoint sees it, and what is noted when it has ended."""

from __future__ import annotations

import random

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.observe.logs import log_request
from ostinato.observe.record import RequestRecord
from ostinato.observe.tracing import Tracing
from ostinato.serve.http.access import Keys, check_host
from ostinato.serve.http.counts import AnswerCounts
from ostinato.serve.http.errors import as_api_error
from ostinato.serve.http.intake import read_body, replayed
from ostinato.serve.settings import ServeSettings, is_loopback
from ostinato.serve.streaming import ClientGone, log_failure

CLIENT_GONE = 499
"""The status, in the log alone, of a request whose client did not wait for it."""


class Gate:
    """ASGI middleware: gives a request its id and its `RequestRecord`, checks host and key, reads the body, and answers
    for what nobody else has answered.

    The id is the answer's header `x-request-id`; id and record are in `request.state`.
    """

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, counts: AnswerCounts, tracing: Tracing | None = None
    ) -> None:
        self._app, self._counts = app, counts
        self._keys = Keys(settings.keys)
        self._is_private = is_loopback(settings.host) and not settings.keys
        self._max_body = settings.max_body
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(f"{random.getrandbits(128):032x}", scope["method"], _printable(scope))
        scope.setdefault("state", {}).update(request_id=record.request_id, record=record)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        headers = Headers(scope=scope)
        try:
            await self._pass(scope, headers, receive, send_noted)
        except (ClientGone, ClientDisconnect):
            record.status = CLIENT_GONE
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                log_failure(record.request_id, error)
            # Once an answer has begun, all that is left is not to complete it.
            if record.status is None:
                await answer.response()(scope, receive, send_noted)
        finally:
            record.end()
            log_request(record)
            self._counts.note(record.method, scope["path"], record.status)
            if self._tracing is not None:
                self._tracing.trace(record, headers)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if self._is_private:
            check_host(headers.get("host"))
        self._keys.check(scope["path"], headers.get("authorization"))
        body = await read_body(headers, receive, self._max_body)
        await self._app(scope, replayed(body, receive), send)


def _printable(scope: Scope) -> str:
    """The path as it was sent, in printable characters, without the query."""
    path = scope.get("raw_path") or scope["path"].encode()
    return "".join(chr(byte) if 32 < byte < 127 else f"%{byte:02X}" for byte in path[:200])
