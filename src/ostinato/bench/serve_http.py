"""HTTP/1.1 for a load generator: replies are handed on piece by piece, in the very callback in which they arrive.

Of the machine that it measures, the generator takes as little as it can. A general client spends four to five times
as long on a piece of a stream as this one, which for a small model is longer than the server's own step.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import SplitResult, urlsplit

from ostinato.errors import ConfigError


class Failure(Exception):
    """One request that failed: `kind` counts it with others, `detail` says more."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Receiver(Protocol):
    """Takes one reply in. Both methods may raise Failure, which ends the exchange."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Once, before the body; names of headers are lower case."""

    def feed(self, data: bytes) -> None:
        """Some of the body."""


class Stale(Exception):
    """A connection that had been used before was closed before it answered."""


class Connection(asyncio.Protocol):
    """One connection: an exchange at a time."""

    def __init__(self) -> None:
        self.used = False
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._ended: asyncio.Future[None] | None = None
        self._buffer = b""
        self._framing = ""
        self._left = 0

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Sends `request` and returns when the whole reply was handed to `receiver`.

        Failure of the receiver, or `broken_stream`; Stale where another connection should be tried.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise Stale
        self._receiver, self._ended = receiver, asyncio.get_running_loop().create_future()
        self._buffer, self._framing, self.reusable = b"", "head", False
        self._transport.write(request)
        await self._ended
        self.used = True

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            return
        try:
            self._take(self._buffer + data if self._buffer else data)
        except Failure as failure:
            self._ended.set_exception(failure)
        except ValueError as error:
            self._ended.set_exception(Failure("bad_reply", f"the reply is no HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._ended is None or self._ended.done():
            return
        if self._framing == "until_closed" and exc is None:
            self._ended.set_result(None)
        elif self._framing == "head" and not self._buffer and self.used:
            self._ended.set_exception(Stale())
        else:
            self._ended.set_exception(Failure("broken_stream", "the connection ended before the reply did"))

    def _take(self, data: bytes) -> None:
        while self._framing == "head":
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return
            self._begin(data[:end])
            data = data[end + 4 :]
        if self._framing == "chunked":
            self._take_chunks(data)
            return
        self._buffer = b""
        if data:
            self._feed(data)
        if self._framing == "length":
            self._left -= len(data)
            if self._left <= 0:
                self._finish()

    def _begin(self, head: bytes) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        version, status, *_ = status_line.split(" ", 2)
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it begins with {status_line[:40]!r}")
        if 100 <= int(status) < 200:
            return  # in advance of the reply's own head (RFC 9110, section 15.2)
        self.reusable = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._framing = "chunked"
        elif "content-length" in headers:
            self._framing, self._left = "length", int(headers["content-length"])
        else:
            self._framing = "until_closed"
        assert self._receiver is not None
        self._receiver.begin(int(status), headers)

    def _take_chunks(self, data: bytes) -> None:
        """RFC 9112, section 7.1. Chunks are taken whole; extensions and trailers are passed over."""
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:end].partition(b";")[0], 16)
            if size == 0:
                if data.find(b"\r\n\r\n", end) < 0:
                    break
                self._finish()
                return
            stop = end + 2 + size
            if len(data) < stop + 2:
                break
            self._feed(data[end + 2 : stop])
            at = stop + 2
        self._buffer = data[at:]

    def _feed(self, data: bytes) -> None:
        assert self._receiver is not None
        self._receiver.feed(data)

    def _finish(self) -> None:
        assert self._ended is not None
        self._ended.set_result(None)


class HttpClient:
    """Posts JSON to one URL, over as many connections as there are requests at once; close it at the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """ConfigError if `url` is not one, or the key could not be in a header."""
        parts = check_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that a header cannot have")
        assert parts.hostname is not None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        lines = [
            f"POST {parts.path}{f'?{parts.query}' if parts.query else ''} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
        ]
        self._head = "\r\n".join(lines).encode()
        self._idle: list[Connection] = []

    async def post(self, body: bytes, receiver: Receiver, timeout: float) -> None:
        """Hands the reply to `receiver`. Failure of the receiver, or `timeout` (seconds, for all of it), `connect` or
        `broken_stream`."""
        request = b"%b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        await self._exchange(request, receiver)
                        return
                    except Stale:
                        continue
        except TimeoutError:
            raise Failure("timeout", f"no end after {timeout:g} s") from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, receiver: Receiver) -> None:
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            await connection.exchange(request, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise Failure("connect", str(error)) from None
        return connection


def check_url(url: str) -> SplitResult:
    """`url` in parts; ConfigError if it is none that could be asked."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise ConfigError(f"{url!r} should be a URL such as http://127.0.0.1:8000/v1")
