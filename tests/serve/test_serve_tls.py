"""TLS below the server's HTTP: real sockets with the standard library's clients, and a client in memory for attacks."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from ostinato.errors import ConfigError
from ostinato.serve.http.connection import HttpConnection
from ostinato.serve.http.connection_limits import ConnectionCounter, ConnectionLimits
from ostinato.serve.http.tls import UNREAD, Certificates, TlsLayer
from tests.support.authority import lock, make_certificate, make_certificate_of, needs_openssl
from tests.support.patience import PATIENCE
from tests.support.unsent import Unsent

pytestmark = needs_openssl
GET = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"
SOON = ConnectionLimits(head_seconds=0.05)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def certificates(files: tuple[Path, Path]) -> Certificates:
    return Certificates(*files, None)


def client(files: tuple[Path, Path], version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files[0]))
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the scheme and what it got."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode() + b" " + body})


class Door:
    """A server on a port of its own: what comes through it is counted in `occupancy`."""

    def __init__(self, certificates: Certificates, limits: ConnectionLimits | None = None, most: int = 100) -> None:
        self.occupancy = ConnectionCounter(most)
        self.port = 0
        self._made = lambda: TlsLayer(
            HttpConnection(uvicorn.Config(echo), ServerState(), {}, limits=limits, occupancy=self.occupancy),
            certificates,
        )

    def run(self, visit: Callable[[Door], Awaitable[Any]]) -> Any:
        async def go() -> Any:
            server = await asyncio.get_running_loop().create_server(self._made, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            try:
                return await asyncio.wait_for(visit(self), PATIENCE)
            finally:
                server.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(go())

    async def connect(self, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if context is None else "localhost"
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=name)

    async def empty(self) -> None:
        while self.occupancy.total:
            await asyncio.sleep(0.01)


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" not in head:
        return head, await reader.read()
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return head, body


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_requests_of_any_size_are_answered_one_after_the_other(
    files: tuple[Path, Path], certificates: Certificates, version: ssl.TLSVersion
) -> None:
    async def visit(door: Door) -> None:
        reader, writer = await door.connect(client(files, version))
        for size in (0, 1, 2**14, 3 * 2**20):
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (size, b"x" * size))
            head, body = await answer(reader)
            assert head.startswith(b"HTTP/1.1 200")
            assert body == b"https " + b"x" * size
        assert door.occupancy.total == 1
        writer.close()
        await door.empty()

    Door(certificates).run(visit)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_versions_before_1_2_are_refused(files: tuple[Path, Path], certificates: Certificates) -> None:
    async def visit(door: Door) -> None:
        context = client(files)
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await door.connect(context)
        await door.empty()

    Door(certificates).run(visit)


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03"])
def test_a_client_that_is_silent_in_the_handshake_is_closed_when_its_time_is_up(
    certificates: Certificates, sent: bytes
) -> None:
    async def visit(door: Door) -> bytes:
        reader, writer = await door.connect(None)
        writer.write(sent)
        got = await reader.read()
        await door.empty()
        return got

    assert Door(certificates, SOON).run(visit) == b""


def test_one_that_is_silent_after_the_handshake_is_told_so(
    files: tuple[Path, Path], certificates: Certificates
) -> None:
    async def visit(door: Door) -> bytes:
        reader, _ = await door.connect(client(files))
        return await reader.read()

    for seconds in (0.5, 5, 50):  # until the handshake is in time
        with suppress(ConnectionError, ssl.SSLError):
            got: bytes = Door(certificates, ConnectionLimits(head_seconds=seconds)).run(visit)
            assert got.startswith(b"HTTP/1.1 408")
            return
    pytest.fail("no handshake was in time")


def test_connections_are_counted_before_the_handshake(files: tuple[Path, Path], certificates: Certificates) -> None:
    async def visit(door: Door) -> None:
        _, silent = await door.connect(None)
        while door.occupancy.total < 1:
            await asyncio.sleep(0.01)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await door.connect(client(files))
        silent.close()
        await door.empty()
        _, writer = await door.connect(client(files))
        writer.close()
        assert door.occupancy.refused == 1

    Door(certificates, most=1).run(visit)


def test_plain_http_is_told_to_use_tls(certificates: Certificates) -> None:
    async def visit(door: Door) -> bytes:
        reader, writer = await door.connect(None)
        writer.write(GET)
        got = await reader.read()
        await door.empty()
        return got

    got: bytes = Door(certificates).run(visit)
    assert got.startswith(b"HTTP/1.1 400")
    assert b"tls_required" in got


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x00\x05hello", b"\x16" * 5000])
def test_what_only_begins_like_tls_ends_the_connection(certificates: Certificates, sent: bytes) -> None:
    async def visit(door: Door) -> None:
        reader, writer = await door.connect(None)
        writer.write(sent)
        with suppress(ConnectionError):
            await reader.read()
        await door.empty()

    Door(certificates).run(visit)


class Wire(Unsent):
    """A client in memory, which reads while `reads`."""

    def __init__(self, layer: TlsLayer, trusted: ssl.SSLContext, reads: bool = True) -> None:
        super().__init__()
        self.layer, self.reads = layer, reads
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = trusted.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")
        layer.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.incoming.write(data)
        if not self.reads:
            self.held += data
            self.layer.pause_writing()

    def send(self, piece: int) -> None:
        """What the client has to send, in pieces, while the server reads."""
        data = self.outgoing.read()
        for begin in range(0, len(data), piece):
            if not self.is_closed:
                self.layer.data_received(data[begin : begin + piece])

    def shake_hands(self, piece: int = 2**16) -> None:
        for _ in range(4):
            with suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
            self.send(piece)

    def read(self) -> bytes:
        got = b""
        with suppress(ssl.SSLWantReadError):
            while piece := self.tls.read(2**16):
                got += piece
        return got


def wired(
    attack: Callable[[Wire], Awaitable[None]],
    files: tuple[Path, Path],
    certificates: Certificates,
    app: Any = echo,
    reads: bool = True,
) -> None:
    async def go() -> None:
        layer = TlsLayer(HttpConnection(uvicorn.Config(app), ServerState(), {}), certificates)
        wire = Wire(layer, client(files), reads)
        await attack(wire)
        layer.connection_lost(None)

    asyncio.run(go())


async def turns(count: int = 40) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@given(handshake=st.integers(1, 600), piece=st.integers(1, 300), body=st.binary(max_size=300))
def test_it_says_the_same_in_whatever_pieces_it_comes(
    files: tuple[Path, Path], certificates: Certificates, handshake: int, piece: int, body: bytes
) -> None:
    async def attack(wire: Wire) -> None:
        wire.shake_hands(handshake)
        wire.tls.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        wire.send(piece)
        await turns()
        assert b"https " + body in wire.read()

    wired(attack, files, certificates)


def test_requests_that_are_not_read_fill_nothing(files: tuple[Path, Path], certificates: Certificates) -> None:
    seen = []

    async def big(scope: Any, receive: Any, send: Any) -> None:
        del receive
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 2**18})

    async def attack(wire: Wire) -> None:
        wire.shake_hands()
        wire.reads = False
        sent = 0
        while wire.is_reading:
            wire.tls.write(GET * 500)
            wire.send(2**16)
            await turns(5)
            sent += 500 * len(GET)
        assert sent < 4 * 2**16
        assert len(seen) == 1
        assert len(wire.held) < 2**18 + 2**14

    wired(attack, files, certificates, big)


def test_a_client_that_says_goodbye_is_gone(files: tuple[Path, Path], certificates: Certificates) -> None:
    told = []

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        del scope, send
        while (message := await receive())["type"] != "http.disconnect":
            pass
        told.append(message)

    async def attack(wire: Wire) -> None:
        wire.shake_hands()
        wire.tls.write(GET)
        wire.send(99)
        await turns()
        with suppress(ssl.SSLWantReadError):
            wire.tls.unwrap()
        wire.send(99)
        assert wire.is_closed
        wire.layer.connection_lost(None)
        await turns()
        assert len(told) == 1

    wired(attack, files, certificates, waiting)


def test_a_client_that_has_tls_answer_without_end_and_reads_nothing_is_thrown_out(
    files: tuple[Path, Path], certificates: Certificates
) -> None:
    class Renewing:
        """As after a request for new keys: TLS has an answer to what holds no data."""

        def __init__(self, transport: Any) -> None:
            self.outgoing = transport._outgoing

        def read(self, size: int) -> bytes:
            del size
            self.outgoing.write(b"k" * 1000)
            raise ssl.SSLWantReadError

    async def attack(wire: Wire) -> None:
        wire.shake_hands()
        wire.reads = False
        transport: Any = wire.layer._transport
        transport._tls = Renewing(transport)
        for _ in range(UNREAD // 1000 + 3):
            wire.layer.data_received(b"x") if not wire.is_closed else None
        assert wire.is_aborted

    wired(attack, files, certificates)


@pytest.mark.parametrize("place", [0, 1])
def test_a_pipe_is_no_file_of_a_certificate(tmp_path: Path, place: int) -> None:
    files = make_certificate(tmp_path)
    files[place].unlink()
    os.mkfifo(files[place])
    with pytest.raises(ConfigError, match="is a pipe or a device; give a file, which is read several times"):
        Certificates(*files, None)


def test_a_certificate_that_is_read_again_is_for_new_connections(tmp_path: Path, caplog: Any) -> None:
    files = make_certificate(tmp_path)
    certificates = Certificates(*files, None)
    of_first, before = client(files), files[0].read_text()
    other = make_certificate(tmp_path, "other")

    def peer(writer: asyncio.StreamWriter) -> str:
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(shown).strip()

    async def visit(door: Door) -> None:
        old_reader, old = await door.connect(of_first)
        for mine, new in zip(files, other, strict=True):
            mine.write_bytes(new.read_bytes())
        certificates.reload()
        _, new_one = await door.connect(client(files))
        assert peer(old) == before.strip() != peer(new_one) == files[0].read_text().strip()
        old.write(GET)
        assert (await answer(old_reader))[1] == b"https "
        files[1].write_text("no key")
        certificates.reload()
        _, newest = await door.connect(client(files))
        assert peer(newest) == peer(new_one)
        for each in (old, new_one, newest):
            each.close()
        await door.empty()

    logger = logging.getLogger("ostinato.serve")
    logger.addHandler(caplog.handler)
    try:
        Door(certificates).run(visit)
    finally:
        logger.removeHandler(caplog.handler)
    assert "the certificate stays as it was" in caplog.text


@pytest.fixture(scope="module")
def wrong(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """What is wrong -> the settings that it is wrong with."""
    path = tmp_path_factory.mktemp("wrong")
    certfile, keyfile = files
    locked = lock(keyfile, "secret-word")
    (path / "text").write_text("nothing")
    (path / "damaged").write_text(certfile.read_text().replace("MI", "IM"))
    return {
        "cannot be read: No such file": (path / "none", keyfile, None),
        "should be in PEM": (certfile, path / "text", None),
        "cannot be used": (path / "damaged", keyfile, None),
        "its private key": (certfile, None, None),
        "does not belong to": (certfile, make_certificate(path)[1], None),
        "ssl_keyfile_password is needed": (certfile, locked, None),
        "ssl_keyfile_password is not": (certfile, locked, "another"),
        "certificate has expired": (*make_certificate_of(path, "20200101000000Z", "20200201000000Z"), None),
        "not yet valid": (*make_certificate_of(path, "20990101000000Z", "20990201000000Z"), None),
    }


@pytest.mark.parametrize(
    "told",
    [
        *("cannot be read: No such file", "should be in PEM", "cannot be used", "its private key"),
        *("does not belong to", "ssl_keyfile_password is needed", "ssl_keyfile_password is not"),
        *("certificate has expired", "not yet valid"),
    ],
)
def test_files_that_are_of_no_use_are_an_error_that_says_why(wrong: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        Certificates(*wrong[told])
    assert "another" not in raised.value.message


def test_a_key_that_is_encrypted_or_stands_with_its_certificate_is_read(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    certfile, keyfile = files
    both = tmp_path / "both.pem"
    both.write_text(keyfile.read_text() + certfile.read_text())
    until = Certificates(both, None, None).valid_until
    assert until == Certificates(certfile, lock(keyfile, "secret-word"), "secret-word").valid_until
    assert until.endswith("GMT")
