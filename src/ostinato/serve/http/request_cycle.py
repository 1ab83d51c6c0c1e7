"""One request and its answer, in the ASGI application's form, and the bytes of the answer."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger("ostinato.serve")

_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}


class CycleConnection(Protocol):
    """Methods that a cycle needs of its connection."""

    def write(self, data: bytes) -> None: ...
    async def writable(self) -> None: ...
    def body_consumed(self) -> None: ...
    def ended(self, cycle: RequestCycle) -> None: ...


class RequestCycle:
    """A request that has its headers, and perhaps not yet its body."""

    def __init__(self, connection: CycleConnection, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        """Begin a cycle.

        `keep_alive`: the client would send further requests. `expects_continue`: it waits before it sends a body.
        """
        self.scope = scope
        self.body = bytearray()
        self.is_received = False
        """True once the whole request has come."""
        self.is_answered = False
        self.keep_alive = keep_alive
        self._connection = connection
        self._expects_continue = expects_continue
        self._is_gone = False
        self.has_begun = False
        self._is_chunked = False
        self._has_body = True
        self._body_delivered = False
        """True once the application has the whole body."""
        self._head = b""
        """Head of the answer, until it is sent with the first part of the body."""
        self._changed = asyncio.Event()

    async def run(self, app: ASGIApp) -> None:
        """Answer with `app`. An answer that it leaves incomplete ends the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed")
        finally:
            self._connection.ended(self)

    def add_body(self, data: bytes) -> None:
        self.body += data
        self._changed.set()

    def end_body(self) -> None:
        self.is_received = True
        self._changed.set()

    def leave(self) -> None:
        """Note that the client is gone."""
        self._is_gone = True
        self._changed.set()

    async def receive(self) -> Message:
        if self._expects_continue and not self.has_begun:
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not (self.body or self.is_received or self._is_gone or self.is_answered):
            self._changed.clear()
            await self._changed.wait()
        if self._is_gone or self.is_answered:
            return {"type": "http.disconnect"}
        if self._body_delivered:
            self._changed.clear()
            while not (self._is_gone or self.is_answered):
                await self._changed.wait()
                self._changed.clear()
            return {"type": "http.disconnect"}
        data, self.body = bytes(self.body), bytearray()
        self._body_delivered = self.is_received
        self._connection.body_consumed()
        return {"type": "http.request", "body": data, "more_body": not self._body_delivered}

    async def send(self, message: Message) -> None:
        await self._connection.writable()
        if self._is_gone or self.is_answered:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
            return
        data, more = message.get("body", b""), message.get("more_body", False)
        if not self._has_body:
            data = b""
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if not more:
                data += b"0\r\n\r\n"
        data, self._head = self._head + data, b""
        if not more:
            self.is_answered = True
            self._changed.set()
        if data:
            self._connection.write(data)

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        is_old = self.scope["http_version"] == "1.0"
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b""))]
        has_length = False
        for name, value in headers:
            lowered = name.lower()
            has_length = has_length or lowered == b"content-length"
            if lowered == b"connection":
                self.keep_alive = self.keep_alive and value.lower() != b"close"
            elif lowered != b"transfer-encoding":
                lines.append(b"%b: %b\r\n" % (name, value))
        self._has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        if self._has_body and not has_length:
            if is_old:
                self.keep_alive = False  # the end of the connection is the end of the answer
            else:
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.is_received:
            self.keep_alive = False  # the rest of the request is discarded
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif is_old:
            lines.append(b"connection: keep-alive\r\n")
        self._head = b"".join(lines) + b"\r\n"


def refusal(status: int, body: bytes) -> bytes:
    """Return a whole answer with a JSON body, to something that is no request; the connection ends after it."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        status,
        _REASONS.get(status, b""),
        len(body),
        body,
    )
