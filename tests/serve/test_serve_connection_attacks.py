"""Attacks below the application, on a transport that counts what the server holds: no memory or clock is measured."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from hypothesis import example, given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from ostinato.config import EngineConfig
from ostinato.serve.http.connection import PIECE, HttpConnection
from ostinato.serve.http.connection_limits import NO_DESCRIPTOR, QUIET, ConnectionCounter, ConnectionLimits, RefusalLog
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.settings import ServeSettings
from tests.support.unsent import Unsent

BIG = b"x" * 2**18
GET = b"GET /plan HTTP/1.1\r\nHost: a\r\n\r\n"


class Wire(Unsent):
    """A client that reads while `reads`; what it has not read is in `pinned_by`, what it has in `got`."""

    def __init__(self, connection: HttpConnection, peer: str = "127.0.0.1", reads: bool = True) -> None:
        super().__init__({"peername": (peer, 5), "sockname": ("127.0.0.1", 80)})
        self.connection, self.reads = connection, reads
        self.got = b""
        self.most_held = 0
        connection.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.is_closed
        if self.reads:
            self.got += data
            return
        self.held += data
        self.most_held = max(self.most_held, len(self.held))
        self.connection.pause_writing()

    def read(self) -> None:
        self.got, self.held = self.got + self.held, b""
        self.connection.resume_writing()

    def leave(self) -> None:
        self.is_closed = True
        self.connection.connection_lost(None)


class App:
    """Answers with what it got, or with `answer`; what it saw stands in `seen`."""

    def __init__(self, answer: bytes | None = None, status: int = 200, reads: bool = True) -> None:
        self.answer, self.status, self.reads = answer, status, reads
        self.seen: list[tuple[str, bytes]] = []
        self.left = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["path"], body))
        if not self.go.is_set():
            assert (await receive())["type"] == "http.disconnect"
            self.left += 1
            return
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body if self.answer is None else self.answer})


def attacked(
    attack: Callable[[HttpConnection, Wire, App], Any],
    make: Callable[[], App] = App,
    limits: ConnectionLimits | None = None,
    **wire: Any,
) -> tuple[Wire, App]:
    """Runs `attack` against a new connection."""

    async def go() -> tuple[Wire, App]:
        app = make()
        config = uvicorn.Config(app)
        connection = HttpConnection(config=config, server_state=ServerState(), app_state={}, limits=limits)
        transport = Wire(connection, **wire)
        await attack(connection, transport, app)
        if not transport.is_closed:
            transport.leave()
        else:
            connection.connection_lost(None)
        return transport, app

    return asyncio.run(go())


async def turns(count: int = 40) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def feed(connection: HttpConnection, wire: Wire, data: bytes, piece: int = 2**16) -> int:
    """Sends while the server reads. Returns the bytes that it took."""
    sent = 0
    while sent < len(data) and wire.is_reading and not wire.is_closed:
        connection.data_received(data[sent : sent + piece])
        sent += piece
    return min(sent, len(data))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    found: dict[str, Any] = json.loads(body)["error"]
    return found


def test_answers_to_pipelined_requests_wait_for_their_reader_and_nothing_grows_meanwhile() -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:
        taken = 0
        for _ in range(20):
            taken += feed(connection, wire, GET * 20_000)
            await turns()
        assert not wire.is_reading
        assert taken <= 3 * 2**16  # what may wait, one read on top, and what was parsed
        assert len(app.seen) == 1
        assert wire.most_held < len(BIG) + 200
        wire.read()
        await turns()
        assert len(app.seen) == 2

    attacked(attack, lambda: App(BIG), reads=False)


def test_every_pipelined_request_is_answered_in_its_order_once_they_are_read() -> None:
    paths = [f"/{number}" for number in range(3000)]
    sent = b"".join(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode() for path in paths)

    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:
        at = 0
        while at < len(sent):
            at += feed(connection, wire, sent[at:], 9999)
            await turns()
        while len(app.seen) < len(paths):
            await turns()

    _, app = attacked(attack)
    assert [path for path, _ in app.seen] == paths


def test_a_client_that_leaves_is_noticed_behind_a_pipelined_request() -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:
        app.go.clear()
        connection.data_received(GET + GET)
        await turns()
        assert wire.is_reading
        wire.leave()
        await turns()

    _, app = attacked(attack)
    assert (len(app.seen), app.left) == (1, 1)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx: " + b"a" * 10**7,
        b"GET /" + b"a" * 10**7,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10**6,
        b"\r\n" * 10**6,
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 10**6,
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 10**7,
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 10**7,
    ],
    ids=["value", "path", "many", "empty lines", "trailers", "a trailer", "chunk extension"],
)
def test_headers_and_trailers_are_refused_when_they_pass_their_bound(head: bytes) -> None:
    limits = ConnectionLimits()

    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        taken = 0
        while not wire.got and taken < len(head):
            taken += feed(connection, wire, head[taken : taken + 1000])
            await turns(4)
        assert taken <= limits.head_bytes + 3 * PIECE
        feed(connection, wire, head[taken:])  # the rest is thrown away
        assert wire.is_reading or wire.is_closed

    wire, app = attacked(attack)
    assert status(wire.got) == 431
    assert error(wire.got)["code"] == "headers_too_large"
    assert not app.seen


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"])
def test_headers_that_do_not_come_end_the_connection(begin: bytes) -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        if begin:
            connection.data_received(begin)
        while not wire.is_closed:
            await asyncio.sleep(0.001)

    wire, _ = attacked(attack, limits=ConnectionLimits(head_seconds=0.01))
    assert status(wire.got) == 408
    assert error(wire.got)["code"] == "header_timeout"


def test_a_half_sent_request_does_not_end_the_answer_before_it() -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:
        app.go.clear()
        connection.data_received(GET + GET[:9])
        await asyncio.sleep(0.05)
        assert not wire.is_closed

    attacked(attack, limits=ConnectionLimits(head_seconds=0.01, idle_seconds=0.01))


def test_an_idle_connection_is_closed() -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(GET)
        while not wire.is_closed:
            await asyncio.sleep(0.001)

    wire, _ = attacked(attack, limits=ConnectionLimits(idle_seconds=0.01))
    assert status(wire.got) == 200
    assert wire.got.count(b"HTTP/1.1") == 1


def test_a_body_that_nobody_takes_is_not_read() -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        async def waits(*_: Any) -> None:
            await asyncio.Event().wait()

        connection._app = waits  # type: ignore[assignment]
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n"
        assert feed(connection, wire, head + b"x" * 10**8) <= 4 * 2**16
        await turns()
        assert not wire.is_reading

    attacked(attack)


def test_the_sender_of_a_refused_body_comes_to_read_the_answer() -> None:
    body = b"x" * 10**7

    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n")
        await turns()
        assert status(wire.got) == 413
        assert b"connection: close" in wire.got
        assert feed(connection, wire, body) == len(body)
        assert wire.is_closed
        assert not wire.is_aborted

    attacked(attack, lambda: App(b"too large", 413, reads=False))


def test_a_refused_body_without_end_is_cut() -> None:
    limits = ConnectionLimits(drained_bytes=10**6)

    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n")
        await turns()
        assert feed(connection, wire, b"x" * 10**7) <= 10**6 + 2**16
        assert wire.is_aborted

    attacked(attack, lambda: App(b"too large", 413, reads=False), limits)


@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_an_upgrade_is_ignored_and_what_follows_is_served(method: bytes) -> None:
    body = b"hello" if method == b"POST" else b""
    head = b"%b /a HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" % method
    head += b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n" + (b"Content-Length: 5\r\n" if body else b"") + b"\r\n"

    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(head + body + b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n")
        await turns()

    wire, app = attacked(attack)
    assert app.seen == [("/a", body), ("/b", b"")]
    assert status(wire.got) == 200


@pytest.mark.parametrize("alive", [False, True])
def test_a_stream_for_http_1_0_is_not_chunked(alive: bool) -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(b"GET / HTTP/1.0\r\n%b\r\n" % (b"Connection: keep-alive\r\n" if alive else b""))
        await turns()
        assert wire.is_closed

    wire, _ = attacked(attack, lambda: App(b"stream"))
    head, _, body = wire.got.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == b"stream"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_with_an_error_object(request_: bytes) -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(request_)
        await turns()

    wire, app = attacked(attack)
    assert status(wire.got) == 400
    assert set(error(wire.got)) == {"message", "type", "param", "code"}
    assert not app.seen


def framed(*headers: bytes, line: bytes = b"POST / HTTP/1.1", body: bytes = b"2\r\nhi\r\n0\r\n\r\n") -> bytes:
    return b"\r\n".join((line, b"Host: a", *headers, b"", body))


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (framed(b"Transfer-Encoding: gzip, chunked"), 501),
        (framed(line=b"GET / HTTP/2.0", body=b""), 505),
        (framed(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"), 501),
        *(
            (framed(b"Transfer-Encoding: " + coding), 400)
            for coding in (b"identity", b"gzip", b"xchunked", b"chunked;a=b")
        ),
        *((framed(b"Transfer-Encoding: " + coding), 400) for coding in (b"chunked, gzip", b"chunked, chunked", b"")),
        (framed(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0"), 400),
        *((framed(line=b"GET / HTTP/" + version, body=b""), 505) for version in (b"0.9", b"2.1", b"3.0", b"9.9")),
        (b"GET /\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        *((framed(line=b"GET / HTTP/" + version, body=b""), 400) for version in (b"1", b"1.10", b"01.1", b"1.1 ")),
        *((framed(line=method + b" / HTTP/1.1", body=b""), 501) for method in (b"FOO", b"get", b"X-Y")),
        *(
            (framed(b"Expect: " + wish, b"Content-Length: 2", body=b"hi"), 417)
            for wish in (b"foo", b"100-continue, foo")
        ),
        *(
            (framed(b"Content-Length: " + length, body=b"hi"), 400)
            for length in (b"+2", b"-2", b"2_0", b"2 2", b"2, 2", b"0x2", b"2;", b"", b"9" * 30)
        ),
        *(
            (framed(line=b"GET %b HTTP/1.1" % target, body=b""), 400)
            for target in (b"*", b"a", b"b:80", b"/a#b", b"http://b/#c")
        ),
        *(
            (framed(line=b"GET %b HTTP/1.1" % target, body=b""), 400)
            for target in (b"ftp://b/", b"http://u@b/", b"http:///")
        ),
        *((framed(b"X: a%bb" % bytes([code]), body=b""), 400) for code in (0, 1, 10, 11, 13, 27, 127)),
        *((framed(b"X%bY: a" % bytes([code]), body=b""), 400) for code in (0, 9, 10, 13, 32, 34, 127, 200)),
        *((framed(b"X: a\r\n" + fold, body=b""), 400) for fold in (b" b", b"\tb", b": b", b"no colon")),
        (framed(b"X: a", line=b"GET / HTTP/1.1", body=b"").replace(b"\r\n", b"\n"), 400),
    ],
)
def test_what_http_has_and_this_server_has_not_gets_the_status_that_says_so(request_: bytes, answer: int) -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(request_)
        await turns()

    wire, app = attacked(attack)
    assert status(wire.got) == answer
    assert error(wire.got)["type"] == "invalid_request_error"
    assert not app.seen


@pytest.mark.parametrize(
    ("request_", "path", "host"),
    [
        (framed(line=b"GET http://b:1/x?q HTTP/1.1", body=b""), "/x", b"b:1"),
        (framed(line=b"GET HTTPS://[::1] HTTP/1.1", body=b""), "/", b"[::1]"),
        (framed(line=b"GET /x HTTP/1.2", body=b""), "/x", b"a"),
        (framed(b"Transfer-Encoding:  Chunked ", line=b"POST //c/x HTTP/1.1"), "//c/x", b"a"),
        (framed(b"Expect: foo", line=b"GET / HTTP/1.0", body=b""), "/", b"a"),
        (framed(b"X: \xff\t", b"Expect:", line=b"OPTIONS * HTTP/1.1", body=b""), "*", b"a"),
    ],
)
def test_what_http_allows_is_served_and_the_host_of_a_url_counts(request_: bytes, path: str, host: bytes) -> None:
    scopes: list[Any] = []

    class Noting(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await super().__call__(scope, receive, send)

    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        connection.data_received(request_)
        await turns()

    wire, _ = attacked(attack, Noting)
    assert status(wire.got) == 200
    [scope] = scopes
    assert (scope["path"], dict(scope["headers"])[b"host"]) == (path, host)
    assert scope["http_version"] in ("1.0", "1.1")


def test_what_is_refused_is_counted_by_reason_and_logged_without_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = RefusalLog(lambda: now)

    async def send(request: bytes, limits: ConnectionLimits | None = None) -> None:
        made = HttpConnection(uvicorn.Config(App()), ServerState(), {}, limits=limits, refusals=refusals)
        wire = Wire(made, peer="192.0.2.7")
        made.data_received(request)
        await turns()
        if limits is not None:
            await asyncio.sleep(0.05)
        wire.leave()

    async def go() -> None:
        nonlocal now
        for _ in range(100):
            await send(b"nonsense\r\n\r\n")
        await send(b"GET / HTTP/1.1\r\n\r\n")
        await send(b"GET / HTTP/1.1\r\nA: " + BIG)
        await send(b"GET / HTTP/1.1\r\nHo", ConnectionLimits(head_seconds=0.01))
        await send(GET)
        now = QUIET
        await send(b"nonsense\r\n\r\n")

    with caplog.at_level("WARNING", "ostinato.serve"):
        asyncio.run(go())
    assert refusals.counts == {"bad_request": 101, "bad_host": 1, "headers_too_large": 1, "header_timeout": 1}
    first, host, headers, late, again = [record.message for record in caplog.records]
    assert first == "refused (bad_request): this is not a valid HTTP/1.1 request; from 192.0.2.7"
    assert "no Host header" in host
    assert "65536 bytes" in headers
    assert "header_timeout" in late
    assert again == f"{first}, and 99 others since the last such line"


def test_a_connection_without_a_descriptor_is_counted_and_any_other_trouble_is_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio's loop tries again after a second: here `accept` fails three times."""
    refusals = RefusalLog()

    class Scarce(socket.socket):
        failures = 3

        def accept(self) -> Any:
            if Scarce.failures:
                Scarce.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def go() -> bytes:
        loop = asyncio.get_running_loop()
        refusals.watch(loop)
        with Scarce() as listener:
            listener.bind(("127.0.0.1", 0))
            config, state = uvicorn.Config(App(b"there")), ServerState()
            server = await loop.create_server(lambda: HttpConnection(config, state, {}), sock=listener)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            answer = await reader.read()
            writer.close()
            server.close()
            loop.call_exception_handler({"message": "something else"})
        return answer

    with caplog.at_level("WARNING"):
        answer = asyncio.run(go())
    assert b"there" in answer
    assert refusals.counts == {NO_DESCRIPTOR: 3}
    assert len([record for record in caplog.records if "raise ulimit -n" in record.message]) == 1
    assert "something else" in caplog.text


def test_connections_beyond_the_bound_are_told_so_and_there_is_room_again(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        occupancy = ConnectionCounter(10)

        def connect() -> Wire:
            return Wire(HttpConnection(uvicorn.Config(App()), ServerState(), {}, occupancy=occupancy))

        inside = [connect() for _ in range(10)]
        outside = [connect() for _ in range(100)]
        assert all(error(wire.got)["code"] == "too_many_connections" and wire.is_closed for wire in outside)
        assert len([one for one in caplog.records if "turned away" in one.message]) == 1
        for wire in outside + inside:
            wire.leave()
        assert (occupancy.total, occupancy.refused) == (0, 100)
        assert not connect().got
        assert len([one for one in caplog.records if "room for connections" in one.message]) == 1

    with caplog.at_level("INFO", "ostinato.serve"):
        asyncio.run(go())


def test_an_address_has_a_bound_of_its_own_which_this_machine_has_not() -> None:
    occupancy = ConnectionCounter(100, 2)
    assert [occupancy.enter("192.0.2.1") is None for _ in range(3)] == [True, True, False]
    assert [occupancy.enter(one) for one in ("192.0.2.2", *["127.0.0.1"] * 9, *["::1"] * 9, *[""] * 9)] == [None] * 28
    occupancy.leave("192.0.2.1")
    occupancy.leave("192.0.2.1")
    assert occupancy.enter("192.0.2.1") is None


def test_a_trusted_proxy_has_the_connections_of_many_clients() -> None:
    settings = ServeSettings(max_connections_per_address=2, trusted_proxy=("192.0.2.0/28",))
    occupancy = Lifecycle(EngineConfig(), settings, lambda *_: None).occupancy
    assert [occupancy.enter("192.0.2.1") is None for _ in range(9)] == [True] * 9
    assert [occupancy.enter("192.0.2.77") is None for _ in range(3)] == [True, True, False]
    for _ in range(9):
        occupancy.leave("192.0.2.1")
    assert occupancy.total == 3


LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n", b"POST /a HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"Host: a\r\n", b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
        b"Expect: 100-continue\r\n", b"\r\n", b"\r\n", b"hello", b"5\r\nhello\r\n", b"0\r\n\r\n", b"\0", b"x" * 9000,
    ]
)  # fmt: skip


@given(st.lists(LINES | st.binary(max_size=9), max_size=30), st.integers(1, 9999))
@example([b"A", b"GET / HTTP/1.1\r\n", b"\r\n"], 1)
@example([b"GET /\r\n\r\n"], 1)
def test_whatever_comes_the_connection_ends_sound(lines: list[bytes], piece: int) -> None:
    async def attack(connection: HttpConnection, wire: Wire, app: App) -> None:  # noqa: ARG001
        feed(connection, wire, b"".join(lines), piece)
        await turns()
        assert len(connection._pending) <= ConnectionLimits().waiting_bytes + piece

    wire, _ = attacked(attack)
    assert wire.got.count(b"HTTP/1.1 500") == 0
    # Bytes before a method make another one, and a line may end before its version.
    assert not wire.got or status(wire.got) in (100, 200, 400, 431, 501, 505)
