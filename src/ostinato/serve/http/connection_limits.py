"""Limits of connections: bytes, seconds and their number; and requests refused before the application.

Refusals are counted by reason, and logged without a flood.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ostinato.errors import ConfigError, Remedy, os_error_text
from ostinato.os_support import max_open_files, raise_max_open_files

log = logging.getLogger("ostinato.serve")

RESERVED = 64
"""File descriptors that connections leave free for the engine, files and the listening socket."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of each connection, by default those of a server with default settings."""

    head_bytes: int = 2**16
    """Bytes of a request's line and headers, and again of the parts of a body without data: trailers, chunk extensions.
    """
    headers: int = 128
    """Headers of a request, trailers included."""
    head_seconds: float = 15.0
    """Seconds that the headers may take, from the connection or the first byte of the request."""
    idle_seconds: float = 30.0
    """Seconds that a connection may wait for its next request."""
    stalled_seconds: float = 60.0
    """Seconds without progress after which a client that does not read counts as gone."""
    waiting_bytes: int = 2**16
    """Bytes that are read ahead of the application, of a body or of further requests, plus one read."""
    drained_bytes: int = 2**26
    """Bytes of a refused body that are read and discarded, so that its sender comes to read the answer."""
    drained_seconds: float = 10.0
    """Seconds for reading and discarding a refused body."""


@dataclass
class ConnectionCounter:
    """Counter of open connections. It logs once when the limit is reached, and again only after there was room."""

    most: int
    """Connections at once; beyond them, a new one gets status 503 and is closed."""
    most_per_address: int = 0
    """Connections at once of an address that is not loopback; 0: no limit."""
    is_proxy: Callable[[str], bool] = lambda address: False
    """Function that returns whether an address has the connections of many clients."""
    total: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    """Connections that were turned away, since the start."""
    _by_address: Counter[str] = field(default_factory=Counter, init=False)
    _has_told: bool = field(default=False, init=False)

    def enter(self, address: str) -> str | None:
        """Count a connection, which must `leave`. Return why there is no room, or None."""
        self.total += 1
        if self._is_bounded(address):
            self._by_address[address] += 1
        why = None
        if self.total > self.most:
            why = f"the server has {self.most} connections (max_connections)"
        elif self.most_per_address and self._by_address.get(address, 0) > self.most_per_address:
            why = f"this address has {self.most_per_address} connections (max_connections_per_address)"
        if why is not None:
            self.refused += 1
            if not self._has_told:
                self._has_told = True
                log.warning("connections are turned away: %s; the last came from %s", why, address or "this machine")
        return why

    def leave(self, address: str) -> None:
        """Count the end of a connection that entered."""
        self.total -= 1
        if self._is_bounded(address):
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
        if self._has_told and self.total <= self.most * 9 // 10:
            self._has_told = False
            log.info("there is room for connections again; %d were turned away since the start", self.refused)

    def _is_bounded(self, address: str) -> bool:
        if not self.most_per_address:
            return False
        try:
            return not (ipaddress.ip_address(address).is_loopback or self.is_proxy(address))
        except ValueError:
            return False


def fd_limited_connections(descriptors_each: int = 1) -> int:
    """Return the number of connections that the process has file descriptors for."""
    limit = max_open_files()
    return 2**20 if limit is None else _connections_within(limit, descriptors_each)


def raise_fd_limit(connections: int, descriptors_each: int = 1) -> None:
    """Raise the process's limit of descriptors if `connections` need that. ConfigError if it may not."""
    needed = connections * descriptors_each + RESERVED
    limit = raise_max_open_files(needed)
    if limit is None:
        return
    message = (
        f"max_connections {connections}: they need {needed} file descriptors, and the process may have {limit} (ulimit "
        "-n); allow more"
    )
    raise ConfigError(message, [Remedy("max_connections", _connections_within(limit, descriptors_each))])


def _connections_within(limit: int, descriptors_each: int) -> int:
    """Return the connections that `limit` descriptors allow, which leaves those that the process needs itself."""
    return max(max(limit - RESERVED, limit // 2) // descriptors_each, 1)


QUIET = 10.0
"""Seconds after a line of the log in which further refusals of the same reason are only counted."""
NO_DESCRIPTOR = "no_file_descriptor"
_LOOK = 1.0
"""Seconds between two checks for a free file descriptor."""
_OF_ACCEPT = "socket.accept() out of system resource"
"""asyncio's message when a connection cannot be accepted.

asyncio tries again after a second. uvloop reports nothing: it closes the connections that wait.
"""


class RefusalLog:
    """Counter of what a server refuses before its application, by the error's code."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._quiet_until: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def record(self, code: str, message: str, address: str) -> None:
        """Count a refusal, and log it. `address` is the client's, empty on a Unix socket."""
        self.counts[code] += 1
        now = self._clock()
        if now < self._quiet_until.get(code, now):
            self._untold[code] += 1
            return
        self._quiet_until[code] = now + QUIET
        untold = self._untold.pop(code, 0)
        more = f", and {untold} others since the last such line" if untold else ""
        log.warning("refused (%s): %s; from %s%s", code, message, address or "this machine", more)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count connections without a descriptor too: depending on the loop they wait for one or are closed."""

        def lacks(why: object) -> None:
            message = f"connections wait or are closed: {why}; raise ulimit -n, or lower max_connections"
            self.record(NO_DESCRIPTOR, message, "clients")

        def handle(running: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
            if context.get("message") == _OF_ACCEPT:
                lacks(context["exception"])
            else:
                running.default_exception_handler(dict(context))

        def look() -> None:
            try:
                os.close(os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    lacks(os_error_text(error))
            loop.call_later(_LOOK, look)

        loop.set_exception_handler(handle)
        loop.call_later(_LOOK, look)
