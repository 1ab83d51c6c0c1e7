"""TLS below a protocol: it decrypts what a client sends, encrypts what it gets, and buffers nothing.

asyncio's own TLS makes the protocol only after the handshake. Here the protocol is there from the first byte, so its
limits on connections and on silent clients hold for the handshake too. Bytes are encrypted as they are written, so the
limits on what a client does not read are those of the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import Any, cast

from ostinato.serve.http.certificates import Certificates
from ostinato.serve.http.errors import ApiError
from ostinato.serve.http.exchange import refusal
from ostinato.serve.http.refusals import RefusalLog

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

    def get_extra_info(self, name: str, default: Any = None) -> Any:
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
