"""Requests and connections refused before the application: counted by reason, and logged without a flood."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ostinato.errors import os_error_text

log = logging.getLogger("ostinato.serve")

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
        """Count connections too that lack a file descriptor.

        Depending on the loop, such a connection waits until there is one or is closed.
        """

        def lacks(why: object) -> None:
            message = f"connections wait or are closed: {why}; raise ulimit -n, or lower max_connections"
            self.record(NO_DESCRIPTOR, message, "clients")

        def handle(running: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
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
