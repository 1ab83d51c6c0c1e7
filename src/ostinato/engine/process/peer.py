"""Processes that end with the process that has started them, however that one ends."""

from __future__ import annotations

import os
import select
import threading
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def end_with_peer(connection: _HasDescriptor) -> None:
    """Ends this process at once when the other end of a socket is gone, whatever it is doing."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), 0)  # reports only that the connection ended
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="the other end", daemon=True).start()
