"""The socket that the server listens on: a port of an address, or a Unix socket with its file."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from ostinato.child_process import SECRET_VARIABLES
from ostinato.errors import ConfigError, Remedy, os_error_text
from ostinato.serve.http.addresses import is_loopback, join_host_port
from ostinato.serve.settings import ServeSettings

BACKLOG = 2048
FIRST_FOR_ANYONE = 1024
"""First port that is not reserved for the system's own servers."""


@contextmanager
def listening(settings: ServeSettings) -> Iterator[socket.socket]:
    """Yield the socket of these settings. The file of a Unix socket is removed with it.

    ConfigError if the socket cannot be opened.
    """
    if settings.uds is None:
        with _on_port(settings.host, settings.port) as listener:
            yield listener
        return
    with _on_file(settings.uds, int(settings.uds_mode, 8)) as listener:
        made = settings.uds.stat()
        try:
            yield listener
        finally:
            # Another server may have put its own there meanwhile.
            with suppress(OSError):
                if os.path.samestat(made, settings.uds.stat()):
                    settings.uds.unlink()


class EarlyAnswers:
    """Thread that answers on the server's socket while the server's modules are imported, which takes seconds.

    `/health/live` is 200 and anything else 503, as the server itself says it until its model is there: `/health` with
    the status `starting`, the page as HTML that loads itself anew, and an API with its form of an error.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="early-answers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Connections that it has not accepted wait for the server; those it has are answered."""
        self._end.close()
        self._thread.join()
        self._ended.close()  # closing once more does nothing

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._ended], [], [])
            if self._ended in ready:
                return
            with suppress(OSError):  # a client that has gone, or says nothing
                client, _ = self._listener.accept()
                with client:
                    client.settimeout(_EARLY_SECONDS)
                    client.sendall(_early_answer(client.recv(2**16)))
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(2**16):  # what a reset connection has not sent, its client would not read
                        pass


_STARTING = "the server is starting"
_EARLY_SECONDS = 0.5
"""Longest wait for a client before the server itself is there."""


def _early_answer(request: bytes) -> bytes:
    """Return the whole response to a request, whose first line decides."""
    path = b"".join(request.split(b" ")[1:2]).partition(b"?")[0]
    kind, body = "application/json", json.dumps({"status": "starting"})
    if path == b"/":
        kind = "text/html; charset=utf-8"
        body = f'<!doctype html><title>Ostinato</title><meta http-equiv="refresh" content="1"><p>{_STARTING}'
    elif path.startswith(b"/api/"):
        body = json.dumps({"error": _STARTING})
    elif path.startswith(b"/v1/messages"):
        body = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": _STARTING}})
    elif not path.startswith(b"/health"):
        error = {"message": _STARTING, "type": "service_unavailable_error", "param": None, "code": "starting"}
        body = json.dumps({"error": error})
    status = "200 OK" if path == b"/health/live" else "503 Service Unavailable"
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 1\r\nconnection: close\r\n\r\n{body}".encode()


def url_of(listener: socket.socket, is_tls: bool) -> str:
    """Return the URL at which clients find the server."""
    scheme, address = "https" if is_tls else "http", listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{address}"
    return f"{scheme}://{join_host_port(*address[:2])}"


def reach_text(url: str, settings: ServeSettings) -> str | None:
    """Return how other devices of the network, such as a phone, reach the server; None if nothing is to be said."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return None
    if is_loopback(parts.hostname):
        key = "" if settings.keys else f", with a key ({SECRET_VARIABLES['api_key']}) or --insecure,"
        return f"for this machine alone; --host 0.0.0.0{key} lets other devices of the network in, such as a phone"
    if parts.hostname not in ("0.0.0.0", "::"):
        return None
    address = _network_address(_family(parts.hostname))
    if address is None:
        return "on all addresses of this machine; it has none on a network now"
    return f"other devices of the network, such as a phone, open {parts.scheme}://{address}:{parts.port}{settings.root_path}"


_DOCUMENTATION_ADDRESS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Address of each family that only a default route leads to."""


def _network_address(family: socket.AddressFamily) -> str | None:
    """Return this machine's address on its network, as its routes have it and a URL writes it. Nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_DOCUMENTATION_ADDRESS[family], 9))
        address = str(probe.getsockname()[0])
        if not is_loopback(address) and not ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            return f"[{address}]" if family == socket.AF_INET6 else address
    return None


def _on_port(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        # Python adds the address, which the message has already.
        said = os_error_text(error).partition(" (while attempting")[0]
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = Remedy("host", "127.0.0.1")
            advice = "host should be an address of this machine"
        else:
            remedy = Remedy("port", free_port(host, port + 1))
            advice = "choose another port"
        raise ConfigError(f"the server cannot listen on {host}:{port}: {said}; {advice}", [remedy]) from None


def free_port(host: str = "127.0.0.1", first: int | None = None) -> int:
    """Return a free port of `host`, which another process may take meanwhile.

    It is the next one from `first` that needs no privileges, or 0, for any, if there is none near. Without `first` the
    system chooses.
    """
    start = 0 if first is None else max(first, FIRST_FOR_ANYONE)
    for port in range(start, min(start + 100, 2**16) if start else 1):
        with suppress(OSError), socket.create_server((host, port), family=_family(host)) as probe:
            return int(probe.getsockname()[1])
    return 0


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _on_file(path: Path, mode: int) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o777 & ~mode)  # no other user may connect meanwhile
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        advice = "uds should be a path of at most 107 bytes in a directory where files can be made"
        raise ConfigError(f"the server cannot listen on {path}: {os_error_text(error)}; {advice}") from None
    finally:
        os.umask(before)
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the file of a server that has ended without doing so. ConfigError if it is anything else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"uds {path} is a file that is no socket; choose another path, or remove it")
        with socket.socket(socket.AF_UNIX) as asking:
            asking.setblocking(False)  # a server whose queue is full is there too
            asking.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except BlockingIOError:
        pass
    except OSError as error:
        raise ConfigError(f"uds {path} cannot be looked at: {os_error_text(error)}") from None
    raise ConfigError(f"a server listens on {path} already; end it, or choose another path")
