"""HTTP/1.1 client of the router: one exchange with a backend over a connection of its own.

A reply is read as fast as its reader takes it, so a slow client holds its own answer back, up to the backend.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject

HeaderList = Sequence[tuple[bytes, bytes]]
MAX_HEAD = 2**16
"""Bytes of a reply's status line and headers."""
MAX_JSON = 2**24
"""Bytes of a reply that is read whole."""
PIECE = 2**16
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
_ERRNO = re.compile(r"\[Errno (\d+)\]")
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade expect content-length host".split()
)
"""Headers of one connection (RFC 9110, section 7.6.1), and those that are made anew for the next."""


class UpstreamError(Exception):
    """Raised if a backend breaks off its reply, or answers in another way than it should."""


class Unreachable(UpstreamError):
    """Raised if there is no connection to a backend, so that it has seen nothing of the request."""


class Refused(Unreachable):
    """Raised if a backend refuses connections: its process has ended."""


class OutOfResources(UpstreamError):
    """Raised if the router has no descriptor, port or memory for a connection, which says nothing of the backend."""


class Silent(UpstreamError):
    """Raised if a backend takes too long to answer a question about itself."""


@dataclass(frozen=True)
class BackendAddress:
    """Address of a backend: `http://host:port`, or https, with a path that its own paths follow."""

    url: str
    host: str
    port: int
    authority: str
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, url: str) -> BackendAddress:
        """Return a URL as an address. ConfigError for others."""
        try:
            parts = urlsplit(url)
            is_plain = url.isascii() and url.isprintable() and not {" ", "@", "?", "#"} & set(url)
            if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                tls = ssl.create_default_context() if parts.scheme == "https" else None
                port, path = parts.port or (443 if tls else 80), parts.path.rstrip("/")
                return cls(url.rstrip("/"), parts.hostname, port, parts.netloc, path, tls)
        except ValueError:
            pass
        raise ConfigError(f"{url!r} should be the URL of a server, such as http://127.0.0.1:8001")


class UpstreamReply:
    """A reply whose head has arrived. httptools calls the methods that begin with `on_`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_head = self._is_complete = self._is_closed = False

    async def read_head(self) -> None:
        """Read up to the end of the head. UpstreamError if that fails."""
        num_bytes = 0
        while not self._has_head:
            num_bytes += await self._feed()
            if num_bytes > MAX_HEAD and not self._has_head:
                raise UpstreamError(f"its headers are more than {MAX_HEAD} bytes")

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes. UpstreamError if it breaks off."""
        while True:
            if self._parts:
                data = b"".join(self._parts)
                self._parts.clear()
                yield data
            if self._is_complete:
                return
            await self._feed()

    async def json(self) -> JsonObject:
        """Return the whole body, a JSON object. UpstreamError for any other."""
        data = bytearray()
        async for piece in self.pieces():
            data += piece
            if len(data) > MAX_JSON:
                raise UpstreamError(f"its reply is larger than {MAX_JSON} bytes")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UpstreamError("its reply is no JSON object")
        return value

    def header(self, name: bytes) -> bytes:
        return next((value for each, value in self.headers if each == name), b"")

    def close(self) -> None:
        """End the connection, and so the request, if it is not over. What reads the reply gets an UpstreamError."""
        self._is_closed = True
        self._writer.transport.abort()

    async def _feed(self) -> int:
        try:
            data = await self._reader.read(PIECE)
        except OSError as error:
            raise UpstreamError(f"the connection broke: {error}") from None
        if self._is_closed:
            raise UpstreamError("it was given up")
        if data:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                raise UpstreamError(f"its reply is no HTTP/1.1: {error}") from None
        elif self._has_head and not (self.header(b"content-length") or self.header(b"transfer-encoding")):
            self._is_complete = True  # the end of the connection is the end of such a body
        elif not self._is_complete:
            raise UpstreamError("it closed the connection before its reply was complete")
        return len(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # it precedes the reply's own head
            self.headers.clear()
        else:
            self.status, self._has_head = status, True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head


async def open_reply(
    address: BackendAddress,
    method: str,
    target: bytes,
    headers: HeaderList = (),
    body: bytes = b"",
    *,
    connect_seconds: float = 5.0,
    on_connection: Callable[[UpstreamReply], None] = lambda reply: None,
) -> UpstreamReply:
    """Send a request, and return its reply once the head is there; the caller closes it.

    `on_connection` is called before anything is sent, with the reply that is to come: closing it ends the request.

    UpstreamError if there is none, Unreachable or OutOfResources if nothing was sent. Cancelled, it ends the request.
    """
    try:
        async with asyncio.timeout(connect_seconds):
            connecting = asyncio.open_connection(address.host, address.port, ssl=address.tls, limit=PIECE)
            reader, writer = await connecting
    except TimeoutError:
        raise Unreachable(f"no connection within {connect_seconds:g} s") from None
    except OSError as error:
        raise _without_connection(error) from None
    reply = UpstreamReply(reader, writer)
    on_connection(reply)
    try:
        path, host = address.path.encode() + target, address.authority.encode()
        lines = [b"%b %b HTTP/1.1\r\nHost: %b\r\n" % (method.encode(), path, host)]
        lines += [b"%b: %b\r\n" % each for each in headers if each[0].lower() not in HOP_BY_HOP]
        if method == "POST":
            lines.append(b"Content-Length: %d\r\n" % len(body))
        writer.write(b"".join([*lines, b"Connection: close\r\n\r\n", body]))
        with suppress(OSError):  # it may have refused before it had read all
            await writer.drain()
        await reply.read_head()
    except BaseException:
        reply.close()
        raise
    return reply


def _without_connection(error: OSError) -> UpstreamError:
    """Return the error for a connection that could not be opened."""
    # For a name with several addresses, asyncio has their numbers in its text alone.
    numbers = {error.errno} if error.errno is not None else {int(each) for each in _ERRNO.findall(str(error))}
    kind: type[UpstreamError] = Unreachable
    if numbers & _OWN_LIMITS:
        kind = OutOfResources
    elif numbers and numbers <= {errno.ECONNREFUSED, errno.ECONNRESET}:
        kind = Refused
    return kind(f"no connection: {error}")
