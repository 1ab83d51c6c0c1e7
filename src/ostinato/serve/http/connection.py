"""A client's connection: HTTP/1 read by httptools within limits, answered by the application, one request at a time.

The head of a request has its errors, its wishes for the connection, and its part of the ASGI scope. uvicorn makes one
connection per client (`http=` of its configuration) and ends them at shutdown. Memory does not grow with what a client
sends or does not read: bytes are parsed only when the request before them is answered, and are read from the socket
only while few wait to be parsed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from ostinato.serve.http.addresses import HOST_HEADER
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.connection_limits import (
    ConnectionCounter,
    ConnectionLimits,
    RefusalLog,
    fd_limited_connections,
)
from ostinato.serve.http.request_cycle import RequestCycle, refusal

HeaderList = Sequence[tuple[bytes, bytes]]
"""Headers of a request: names in lower case, and values."""
_ABSOLUTE = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)
"""Target of a request that is a URL, as clients write it for a proxy (RFC 9112, section 3.2.2), and its authority."""
_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ \S+ HTTP/([0-9])\.[0-9]\r\n")


def head_error(method: bytes, url: bytes, version: str, headers: HeaderList) -> ApiError | None:
    """Return why the request is refused before any application sees it, or None."""
    if not version.startswith("1."):
        return _version_error(version)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return ApiError(400, "the request has more than one Host header; send one", code="bad_host")
    if not hosts and version != "1.0":
        return ApiError(400, "the request has no Host header, which HTTP/1.1 asks for", code="bad_host")
    if hosts and not HOST_HEADER.fullmatch(hosts[0]):
        return ApiError(400, "the Host header is not a host's name or address, and perhaps a port", code="bad_host")
    if method == b"CONNECT":
        return ApiError(400, "CONNECT is not served: this is no proxy", code="bad_request")
    try:
        httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return ApiError(400, "the request's path is not valid", code="bad_request")
    target = _ABSOLUTE.match(url)
    if b"#" in url or (url == b"*" and method != b"OPTIONS") or not (target or url.startswith((b"/", b"*"))):
        return ApiError(400, "the request's target is neither a path nor an http URL; send a path", code="bad_request")
    if target and not HOST_HEADER.fullmatch(target[1]):
        return ApiError(400, "the request's URL has no valid host, and perhaps a port", code="bad_host")
    return _coding_error(version, headers) or _expectation_error(version, headers)


def _version_error(version: str) -> ApiError:
    return ApiError(505, f"HTTP/{version} is not served here; send HTTP/1.1", code="http_version")


def _coding_error(version: str, headers: HeaderList) -> ApiError | None:
    """Return why a body's transfer coding is refused (RFC 9112, section 6), or None."""
    if all(name != b"transfer-encoding" for name, _ in headers):
        return None
    codings = _words(headers, b"transfer-encoding")
    if version == "1.0" or codings[-1:] != [b"chunked"] or codings.count(b"chunked") > 1:
        message = "the length of the body is not known: the last Transfer-Encoding, and only that, should be chunked"
        return ApiError(400, message, code="bad_request")
    if len(codings) > 1:
        message = "Transfer-Encoding: chunked is served, and no other coding with it; send the body as it is"
        return ApiError(501, message, code="transfer_encoding")
    return None


def _expectation_error(version: str, headers: HeaderList) -> ApiError | None:
    if version == "1.0" or set(_words(headers, b"expect")) <= {b"100-continue"}:
        return None
    return ApiError(417, "the header Expect may only hold 100-continue; leave it out", code="expectation_failed")


def _words(headers: HeaderList, name: bytes) -> list[bytes]:
    """Return the elements of a header that is a list, in lower case."""
    words = b",".join(value for each, value in headers if each == name).lower().split(b",")
    return [word for word in (word.strip(b" \t") for word in words) if word]


def scope_of(method: bytes, url: bytes, version: str, headers: HeaderList, root_path: str) -> Scope:
    """Return the part of the ASGI scope that comes from the head.

    `headers` are passed on unchanged, except that the host of a target which is a URL replaces the header Host.
    """
    parsed = httptools.parse_url(url)
    path = parsed.path or b"/"
    if target := _ABSOLUTE.match(url):
        headers = [(name, target[1] if name == b"host" else value) for name, value in headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if version == "1.0" else "1.1",
        "method": method.decode("ascii"),
        "root_path": root_path,
        "path": root_path + unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": root_path.encode() + path,
        "query_string": parsed.query or b"",
        "headers": headers,
    }


def connection_options(version: str, headers: HeaderList) -> tuple[bool, bool]:
    """Return whether the client would send further requests, and whether it waits before it sends the body."""
    words = _words(headers, b"connection")
    if version == "1.0":
        return b"keep-alive" in words, False
    return b"close" not in words, b"100-continue" in _words(headers, b"expect")


def framing_of(headers: HeaderList) -> bytes:
    """Return a head with the headers that describe the body, and no others."""
    framing = [(name, value) for name, value in headers if name in (b"content-length", b"transfer-encoding")]
    return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % each for each in framing)


def _parser_problem(error: httptools.HttpParserError, piece: bytes) -> ApiError:
    """Return why the parser has refused `piece`, as far as that can be known."""
    line = _REQUEST_LINE.match(piece)
    if line and line[1] != b"1":
        return _version_error(line[1].decode())
    if line and isinstance(error, httptools.HttpParserInvalidMethodError):
        return ApiError(501, "the request's method is not served by any path", code="unknown_method")
    return ApiError(400, "this is not a valid HTTP/1.1 request", code="bad_request")


TOO_MANY = "too_many_connections"
PIECE = 8192
"""Bytes that are parsed at once; they may hold many further requests before the first is answered."""


class HttpConnection(asyncio.Protocol):
    """Protocol that reads requests, has the application answer them in order, and closes at a limit."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        limits: ConnectionLimits | None = None,
        occupancy: ConnectionCounter | None = None,
        refusals: RefusalLog | None = None,
    ) -> None:
        """Make a connection; the first four arguments are uvicorn's.

        `occupancy` and `refusals` are shared by the connections of a server.
        """
        self._app = config.loaded_app if config.loaded else config.app
        self._root_path = config.root_path
        self._server, self._app_state = server_state, app_state
        self._limits = limits or ConnectionLimits()
        self._occupancy = occupancy or ConnectionCounter(fd_limited_connections())
        self._refusals = refusals or RefusalLog()
        self._parser = self._new_parser()
        self._pending = bytearray()
        self._cycles: deque[RequestCycle] = deque()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._in_head = self._is_ending = self._is_reading_off = False
        self._drained = -1
        """Bytes discarded since the connection only waits for its client to finish; -1 before."""
        self._is_repeated = False
        """True if the parser receives a head that it had already."""
        self._is_upgrade = False
        """True if the parser took the request's body for another protocol, and must receive it again."""
        self._num_headers = self._overhead = 0
        self._problem: ApiError | None = None

    # events of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        # Anything that the client has not read pauses writing: also the end of an answer, however short.
        self._transport.set_write_buffer_limits(high=0)
        self._server.connections.add(cast(Any, self))
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self._here = (str(here[0]), int(here[1])) if isinstance(here, tuple) else None
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        why = self._occupancy.enter(self._address)
        if why is not None:
            self._refuse(ApiError(503, why, code=TOO_MANY), drain=False)
        else:
            self._after("head", self._limits.head_seconds, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self._drained >= 0:
            self._drained += len(data)
            if self._drained > self._limits.drained_bytes:
                self._transport.abort()
                return
            if self._is_ending:
                return
        self._pending += data
        self._parse()

    def eof_received(self) -> None:
        pass  # the transport closes itself: a client that is done sending counts as gone

    def pause_writing(self) -> None:
        self._writable.clear()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._end_timer("reader")
        self._writable.set()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # the reason does not matter
        for name in list(self._timers):
            self._end_timer(name)
        self._server.connections.discard(cast(Any, self))
        self._occupancy.leave(self._address)
        self._is_ending = True
        for cycle in self._cycles:
            cycle.leave()
        self._pending.clear()
        self._writable.set()

    def shutdown(self) -> None:
        """End the connection for uvicorn: a running answer is finished, and nothing after it is begun."""
        if self._task is None and not self._transport.is_closing():
            self._transport.close()
        elif self._cycles:
            self._cycles[0].keep_alive = False

    # events of httptools

    def on_message_begin(self) -> None:
        if self._is_repeated:
            return
        self._in_head = True
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._overhead = self._num_headers = 0
        self._await_request()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeated:
            return
        self._num_headers += 1
        if self._num_headers > self._limits.headers:
            self._headers_too_large()
        elif self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_repeated:
            self._is_repeated = False
            return
        self._is_upgrade = self._parser.should_upgrade()
        self._in_head = False
        self._end_timer("head")
        self._end_timer("idle")
        if self._problem is None:
            version, method = self._parser.get_http_version(), self._parser.get_method()
            self._problem = head_error(method, self._url, version, self._headers)
        if self._problem is None:
            self._cycles.append(self._new_cycle())
            self._go_on()

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        if self._problem is None and self._drained < 0:
            self._cycles[-1].add_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        if self._drained >= 0:
            self._transport.close()
        elif self._problem is None:
            self._cycles[-1].end_body()

    # events of a cycle

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def writable(self) -> None:
        if not self._writable.is_set():
            await self._writable.wait()

    def body_consumed(self) -> None:
        if self._pending:
            self._loop.call_soon(self._parse)

    def ended(self, cycle: RequestCycle) -> None:
        """Handle the end of a cycle: its application has returned."""
        self._task = None
        if self._transport.is_closing():
            return
        self._cycles.popleft()
        if not cycle.is_answered:
            if self._problem is not None and not cycle.has_begun:
                self._refuse(self._problem)  # the rest of its body is wrong
            else:
                self._transport.abort()  # so that the client knows that the answer is incomplete
        elif not cycle.is_received:
            self._drain()
            self._parse()
        elif not cycle.keep_alive:
            self._transport.close()
        else:
            self._loop.call_soon(self._go_on)

    # internals

    def _parse(self) -> None:
        while self._pending and not self._is_ending and not self._transport.is_closing() and self._may_parse():
            piece = bytes(self._pending[:PIECE])
            del self._pending[:PIECE]
            self._overhead += len(piece)
            try:
                self._feed(piece)
            except httptools.HttpParserError as error:
                if self._problem is None:
                    self._problem = _parser_problem(error, piece)
            if self._problem is None and self._overhead > self._limits.head_bytes + PIECE:
                self._headers_too_large()
            if self._problem is not None:
                self._is_ending = True
                if self._cycles and not self._cycles[-1].is_received:
                    self._cycles[-1].leave()
                self._go_on()
        self._set_reading()

    def _feed(self, piece: bytes) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # No other protocol is spoken, but the parser has skipped the body. A new one gets the body's length.
            self._pending[:0] = piece[int(upgrade.args[0]) :]
            self._is_upgrade, self._is_repeated = False, True
            self._parser = self._new_parser()
            self._parser.feed_data(framing_of(self._headers))

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Versions are looked at in `head_error`: HTTP/1.2 counts as 1.1 (RFC 9110, section 2.5).
        parser.set_dangerous_leniencies(lenient_version=True)
        return parser

    def _may_parse(self) -> bool:
        if self._drained >= 0 or not self._cycles:
            return True
        last = self._cycles[-1]
        return not last.is_received and len(last.body) < self._limits.waiting_bytes

    def _set_reading(self) -> None:
        if self._transport.is_closing():
            return
        off = self._drained < 0 and len(self._pending) >= self._limits.waiting_bytes
        if off != self._is_reading_off:
            self._is_reading_off = off
            (self._transport.pause_reading if off else self._transport.resume_reading)()

    def _go_on(self) -> None:
        """Begin the next answer, if the one before is over and its client has taken it."""
        if self._task is not None or self._transport.is_closing() or self._drained >= 0 or not self._writable.is_set():
            return
        if self._cycles:
            self._task = self._loop.create_task(self._cycles[0].run(cast(ASGIApp, self._app)))
            self._server.tasks.add(self._task)
            self._task.add_done_callback(self._server.tasks.discard)
            self._server.total_requests += 1
        elif self._problem is not None:
            self._refuse(self._problem)
        else:
            self._parse()
            self._await_request()

    def _await_request(self) -> None:
        """Limit the time until the next request, and that of its headers, once no earlier request is left."""
        if self._cycles or self._problem is not None or self._drained >= 0 or "head" in self._timers:
            return
        if self._in_head:
            self._end_timer("idle")
            self._after("head", self._limits.head_seconds, self._head_is_late)
        elif "idle" not in self._timers:
            self._after("idle", self._limits.idle_seconds, self._transport.close)

    def _new_cycle(self) -> RequestCycle:
        version, method = self._parser.get_http_version(), self._parser.get_method()
        scope = {
            **scope_of(method, self._url, version, self._headers, self._root_path),
            "server": self._here,
            "client": self._client,
            "scheme": self._scheme,
            "state": self._app_state.copy(),
        }
        keep_alive, waits = connection_options(version, self._headers)
        return RequestCycle(self, scope, keep_alive=keep_alive, expects_continue=waits)

    def _headers_too_large(self) -> None:
        if self._problem is None:
            limits = self._limits
            message = f"the headers are more than {limits.headers}, or than {limits.head_bytes} bytes"
            self._problem = ApiError(431, message, code="headers_too_large")

    def _head_is_late(self) -> None:
        seconds = self._limits.head_seconds
        message = f"the request's headers did not arrive within {seconds:g} seconds (header_timeout)"
        self._refuse(ApiError(408, message, code="header_timeout"), drain=False)

    def _refuse(self, error: ApiError, drain: bool = True) -> None:
        self._is_ending = True
        self._pending.clear()
        if error.code != TOO_MANY:  # the occupancy counts those
            self._refusals.record(str(error.code), error.message, self._address)
        self.write(refusal(error.status, json.dumps(error.body()).encode()))
        if drain:
            self._drain()
        else:
            self._transport.close()

    def _drain(self) -> None:
        """Discard what the client sends for a while, so that it comes to read its answer."""
        self._drained = 0
        self._after("drain", self._limits.drained_seconds, self._transport.close)
        self._set_reading()

    def _wait_for_reader(self) -> None:
        left = self._transport.get_write_buffer_size()
        self._after("reader", self._limits.stalled_seconds, self._look, left)

    def _look(self, left_before: int) -> None:
        if self._transport.get_write_buffer_size() < left_before:
            self._wait_for_reader()
        else:
            self._transport.abort()

    @property
    def _address(self) -> str:
        return self._client[0] if self._client else ""

    def _after(self, name: str, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        self._end_timer(name)
        self._timers[name] = self._loop.call_later(seconds, call, *arguments)

    def _end_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
