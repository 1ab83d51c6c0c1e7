"""HTTP/1.1 client of the load generator: it parses streamed replies of an OpenAI-compatible server.

Each piece of a reply is passed on in the callback in which it arrives. The generator often shares its cores with the
server that it measures, so it uses as little of them as it can. A general client takes four to five times as long for a
piece of a stream; for a small model that is longer than the server's own step.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from ostinato.errors import ConfigError
from ostinato.json_io import JsonMapping


class Failure(Exception):
    """Failure of one request: `kind` groups it with others, `detail` says more."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Receiver(Protocol):
    """Receiver of one reply. Both methods may raise Failure, which ends the exchange."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Accept status and headers, once, before the body; names of headers are lower case."""

    def feed(self, data: bytes) -> None:
        """Accept a piece of the body."""


class ConnectionClosed(Exception):
    """Raised if a connection from an earlier request was closed before it answered this one."""


class ClientConnection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.used = False
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._reply: _Reply | None = None

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send `request` and return when the whole reply was passed to `receiver`.

        Raises the receiver's Failure, or `broken_stream`; ConnectionClosed if another connection should be tried.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionClosed
        self._reply = reply = _Reply(receiver)
        self.reusable = False
        self._transport.write(request)
        await reply.ended
        self.used, self.reusable = True, reply.keeps_alive

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._reply is not None:
            self._reply.lose(was_used=self.used, is_clean=exc is None)


class _Reply:
    """One reply as it arrives; httptools calls the methods that begin with `on_`."""

    def __init__(self, receiver: Receiver) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.keeps_alive = False
        self.on_body = receiver.feed
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._has_data = False
        self._has_begun = False

    def take(self, data: bytes) -> None:
        if self.ended.done():
            return
        self._has_data = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(Failure("bad_reply", f"the reply is no HTTP/1.1: {error}"))

    def lose(self, *, was_used: bool, is_clean: bool) -> None:
        """End the reply after the connection is gone. This ends a body that has neither a length nor chunks."""
        if self.ended.done():
            return
        is_bounded = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._has_begun and is_clean and not is_bounded:
            self.ended.set_result(None)
        elif was_used and not self._has_data:
            self.ended.set_exception(ConnectionClosed())
        else:
            self.ended.set_exception(Failure("broken_stream", "the connection ended before the reply did"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # it precedes the reply's own head (RFC 9110, section 15.2)
            self._headers.clear()
            return
        self._has_begun = True
        self._receiver.begin(status, self._headers)

    def on_message_complete(self) -> None:
        if self._has_begun and not self.ended.done():
            self.keeps_alive = self._parser.should_keep_alive()
            self.ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class HttpClient:
    """Client that posts JSON to one URL, over one connection per concurrent request; close it at the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Check the URL and the key. Raises ConfigError if `url` is not one, or the key could not be in a header."""
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
        self._idle: list[ClientConnection] = []

    async def post(self, body: bytes, receiver: Receiver, timeout: float) -> None:
        """Post `body` and pass the reply to `receiver`.

        Raises the receiver's Failure, or `timeout` (seconds, for all of it), `connect` or `broken_stream`.
        """
        request = b"%b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        await self._exchange(request, receiver)
                        return
                    except ConnectionClosed:
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

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(ClientConnection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise Failure("connect", str(error)) from None
        return connection


def check_url(url: str) -> SplitResult:
    """Return `url` in parts. Raises ConfigError if it is not an HTTP URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise ConfigError(f"{url!r} should be a URL such as http://127.0.0.1:8000/v1")


MAX_DETAIL = 300
"""Characters of a server's error message that are kept."""
_HINTS = ("Retry-After", "Location")
"""Headers of a refusal that say what to do about it."""
DONE = b"[DONE]"


class EventParser:
    """Parser of the `data` of server-sent events, from bytes that come in any pieces.

    It leaves out comments, other fields, and events without data, which only keep a connection alive.

    Raises Failure `error_event` for an event named `error`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_error = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
            elif not line and (self._data or self._is_error):
                data, self._data = b"\n".join(self._data), []
                if self._is_error:
                    raise Failure("error_event", _error_text(data))
                if data:
                    yield data

    def finish(self) -> Iterator[bytes]:
        """Yield the rest at the end of a stream: some servers leave out its last line breaks."""
        yield from self.feed(b"\n\n")


class SseReply:
    """Receiver of one reply. `clock` returns the time, in seconds, at which a piece of text arrived."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.chunk_times: list[float] = []
        """Times at which each piece that is not empty arrived."""
        self.end: float | None = None
        """Time at which the reply said that it was done."""
        self.pieces: list[str] = []
        self.usage: Mapping[str, int | None] = {}
        """Counts `prompt_tokens`, `completion_tokens` and `cached_tokens`, as far as the server reports them."""
        self._clock = clock
        self._events = EventParser()
        self._status = 0
        self._hints = ""
        self._error_body = b""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._hints = ", ".join(f"{name}: {headers[name.lower()]}" for name in _HINTS if name.lower() in headers)
        kind = headers.get("content-type", "none")
        if status == 200 and not kind.lower().startswith("text/event-stream"):
            raise Failure("bad_reply", f"the reply is no stream of events, its content type is {kind}")

    def feed(self, data: bytes) -> None:
        if self._status != 200:
            self._error_body += data[:100_000]
            return
        self._take_all(self._events.feed(data))

    def check_complete(self) -> None:
        """Check the reply when nothing more comes.

        Raises Failure `http_<status>` if the server refused, `broken_stream` if the stream broke off.
        """
        if self._status != 200:
            said = _error_text(self._error_body)
            raise Failure(f"http_{self._status}", f"{said} ({self._hints})" if self._hints else said)
        if self.end is None:
            self._take_all(self._events.finish())
        if self.end is None:
            raise Failure("broken_stream", "the stream ended without data: [DONE]")

    def _take_all(self, events: Iterator[bytes]) -> None:
        now = self._clock()
        for event in events:
            if event == DONE:
                self.end = now
            else:
                try:
                    self._take(_parsed(event), now)
                except (AttributeError, TypeError):
                    raise Failure("bad_reply", f"an event has another form: {event[:MAX_DETAIL]!r}") from None

    def _take(self, chunk: object, now: float) -> None:
        if not isinstance(chunk, dict):
            raise Failure("bad_reply", f"an event is no JSON object: {str(chunk)[:MAX_DETAIL]}")
        if chunk.get("error") or chunk.get("object") == "error":
            raise Failure("error_event", str(_message(chunk))[:MAX_DETAIL])
        if chunk.get("usage"):
            self.usage = _usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            piece = _piece(choice)
            if piece:
                if not isinstance(piece, str):
                    raise TypeError
                self.chunk_times.append(now)
                self.pieces.append(piece)


def _piece(choice: JsonMapping) -> str:
    """Return the text of a completion, or of a chat's answer and the thinking before it, which has two names."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _usage(said: JsonMapping) -> dict[str, int | None]:
    """Return the token counts; None for those that the server does not report."""
    details = said.get("prompt_tokens_details") or {}
    counts = {name: said.get(name) for name in ("prompt_tokens", "completion_tokens")}
    counts["cached_tokens"] = details.get("cached_tokens")
    if any(not isinstance(count, int | None) for count in counts.values()):
        raise TypeError
    return counts


def _parsed(event: bytes) -> object:
    try:
        return json.loads(event)
    except ValueError:
        raise Failure("bad_reply", f"an event is no JSON: {event[:MAX_DETAIL]!r}") from None


def _error_text(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, or else the beginning of the body."""
    try:
        return str(_message(json.loads(body)))[:MAX_DETAIL]
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:MAX_DETAIL]


def _message(answer: Mapping[str, object]) -> object:
    error = answer.get("error", answer.get("detail", answer))
    return error.get("message", error) if isinstance(error, Mapping) else error
