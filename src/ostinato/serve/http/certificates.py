"""The server's certificate and its key: read, tried out before a client sees them, and read again on SIGHUP."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from ostinato.errors import ConfigError, os_error_text

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
