"""TLS below a protocol: it decrypts what a client sends, encrypts what it gets, and buffers nothing.

asyncio's own TLS makes the protocol only after the handshake. Here the protocol is there from the first byte, so its
limits on connections and on silent clients hold for the handshake too. Bytes are encrypted as they are written, so the
limits on what a client does not read are those of the transport.

The server's certificate and key are read, tried out before a client sees them, and read again on SIGHUP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from pathlib import Path
from typing import Any, cast

from ostinato.errors import ConfigError, os_error_text
from ostinato.files import is_stream
from ostinato.serve.http.api_errors import ApiError
from ostinato.serve.http.connection_limits import RefusalLog
from ostinato.serve.http.request_cycle import refusal

log = logging.getLogger("ostinato.serve")

_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


class Certificates:
    """Certificate of the next TLS connections. Open connections keep the one that they began with."""

    context: ssl.SSLContext
    """TLS context for the next connection."""
    valid_until: str
    """Expiry date of the certificate, as OpenSSL writes it."""

    def __init__(self, certfile: Path, keyfile: Path | None, password: str | None) -> None:
        """Read the files, which are in PEM. ConfigError if they cannot be used together.

        `certfile` has the server's certificate first, and then those that lead to its authority. Without `keyfile` it
        holds the key too.
        """
        self._given = certfile, keyfile, password
        self._use()
        log.info("ssl_certfile is valid until %s", self.valid_until)

    def _use(self) -> None:
        self.context = _context(*self._given)
        self.valid_until = _rehearsed(self.context, self._given[0])

    def reload(self) -> None:
        """Read the files again. If they cannot be used, the earlier certificate stays, and the log says why."""
        before = self.context
        try:
            self._use()
        except ConfigError as error:
            self.context = before
            log.error("the certificate stays as it was: %s", error.message)
        else:
            log.info("ssl_certfile was read again: it is valid until %s", self.valid_until)


def _context(certfile: Path, keyfile: Path | None, password: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path is not None and is_stream(path):
            raise ConfigError(f"{name} {path} is a pipe or a device; give a file, which is read several times")
        try:
            text = path.read_bytes() if path is not None else b"-----BEGIN "
        except OSError as error:
            raise ConfigError(f"{name} {path} cannot be read: {os_error_text(error)}") from None
        if b"-----BEGIN " not in text:
            raise ConfigError(f"{name} {path} should be in PEM: text with '-----BEGIN ...' lines")
    has_asked = False

    def told() -> str:
        # Otherwise OpenSSL asks at the terminal, and a server would wait there.
        nonlocal has_asked
        has_asked = True
        return password or ""

    of_key = f"the key in {keyfile or certfile}"
    try:
        context.load_cert_chain(certfile, keyfile, told)
    except ssl.SSLError as error:
        if has_asked:
            wrong = "is not what it was encrypted with" if password else "is needed, since it is encrypted"
            raise ConfigError(f"{of_key} cannot be read: ssl_keyfile_password {wrong}") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{of_key} does not belong to the certificate in ssl_certfile {certfile}") from None
        said = (error.reason or "they are damaged").lower().replace("_", " ")
        advice = "ssl_certfile should hold a certificate, and ssl_keyfile its private key"
        raise ConfigError(f"ssl_certfile {certfile} and {of_key} cannot be used: {said}; {advice}") from None
    return context


def _rehearsed(context: ssl.SSLContext, certfile: Path) -> str:
    """Make a handshake in memory with a client that trusts only the certificate, and return its expiry date.

    ConfigError if clients would refuse it whatever they trust.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(certfile)
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours, theirs = context.wrap_bio(up, down, server_side=True), client.wrap_bio(down, up)
        for _ in range(4):  # messages from either side
            for side in (theirs, ours):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            raise ConfigError(f"ssl_certfile {certfile}: {error.verify_message}; ask for a new one") from None
        raise ConfigError(f"ssl_certfile {certfile} is not for a server: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConfigError(f"ssl_certfile {certfile} cannot be used: {os_error_text(error)}") from None
    return str((theirs.getpeercert() or {}).get("notAfter"))


HANDSHAKE = 22
"""First byte of a TLS connection: the record's type."""
PIECE = 2**14
"""Largest size of a TLS record, in bytes."""
UNREAD = 2**16
"""Bytes that a client may leave unread while it makes TLS itself answer, by repeated key updates."""


class TlsLayer(asyncio.Protocol):
    """Layer between a transport and the protocol above, which gets a `TlsTransport` as its own."""

    def __init__(self, above: asyncio.Protocol, certificates: Certificates, refusals: RefusalLog | None = None) -> None:
        self._above, self._certificates, self._refusals = above, certificates, refusals or RefusalLog()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = TlsTransport(cast(asyncio.Transport, transport), self._certificates.context, self._refusals)
        self._above.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        for piece in self._transport.decrypted(data):
            if not piece:
                self.eof_received()  # the client has said that it is done
                self._transport.close()
            elif not self._transport.is_closing():
                self._above.data_received(piece)

    def eof_received(self) -> bool | None:
        return self._above.eof_received()

    def pause_writing(self) -> None:
        self._above.pause_writing()

    def resume_writing(self) -> None:
        self._above.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._above.connection_lost(exc)


class TlsTransport(asyncio.Transport):
    """Transport whose bytes are encrypted on `below`. Before the handshake is over, nothing can be written."""

    def __init__(self, below: asyncio.Transport, context: ssl.SSLContext, refusals: RefusalLog) -> None:
        super().__init__({"sslcontext": context})
        self._below, self._refusals = below, refusals
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._has_begun = self._is_open = False

    def decrypted(self, data: bytes) -> list[bytes]:
        """Return the plain bytes of `data`, which came from below.

        An empty piece at the end means that the client ends the connection. Data that is no TLS ends it.
        """
        if not self._has_begun:
            self._has_begun = True
            if data[0] != HANDSHAKE:
                self._refuse_plain()
                return []
        pieces: list[bytes] = []
        was_open = self._is_open
        self._incoming.write(data)
        try:
            if not self._is_open:
                self._tls.do_handshake()
                self._is_open = True
            while not pieces or pieces[-1]:
                pieces.append(self._tls.read(PIECE))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            if not self._is_open:
                self._note("tls_failed", f"the TLS handshake failed: {error.reason or error}")
            self._send()  # the alert that says why
            self._is_open = False
            self._below.close()
        if was_open and self._outgoing.pending and self._below.get_write_buffer_size() > UNREAD:
            self.abort()
        self._send()
        return pieces

    def write(self, data: Any) -> None:
        if not self._is_open:
            return
        left = memoryview(data)
        while left:
            left = left[self._tls.write(left) :]
        self._send()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # announces the end; the answer is not awaited
            self._send()
        self._below.close()

    def _refuse_plain(self) -> None:
        error = ApiError(400, "this server speaks TLS: ask it by https://", code="tls_required")
        self._note(str(error.code), error.message)
        self._below.write(refusal(error.status, json.dumps(error.body()).encode()))
        self._below.close()

    def _note(self, code: str, message: str) -> None:
        peer = self._below.get_extra_info("peername")
        self._refusals.record(code, message, str(peer[0]) if isinstance(peer, tuple) else "")

    def _send(self) -> None:
        if self._outgoing.pending and not self._below.is_closing():
            self._below.write(self._outgoing.read())

    def get_extra_info(self, name: str, default: object = None) -> object:
        return super().get_extra_info(name) or self._below.get_extra_info(name, default)

    def abort(self) -> None:
        self._is_open = False
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()
