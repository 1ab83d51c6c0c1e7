"""The engine's end of the connection to its server: messages are taken between steps, and sent from any thread."""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Any

from ostinato.engine.process.messages import Unpacker, pack

_AT_ONCE = 2**18
"""Bytes read at a time."""


class Channel:
    """Sends and receives on a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = Unpacker()
        self._sending = threading.Lock()

    def send(self, *messages: Any) -> None:
        """Hands messages over; waits while the other end has not read what came before. OSError if it is gone."""
        data = b"".join(map(pack, messages))
        with self._sending:
            self._connection.sendall(data)

    def receive(self, patience: float | None) -> list[Any]:
        """The messages that have come; for the first of them it waits `patience` seconds, or as long as it takes.
        EOFError if the other end is gone."""
        if patience != 0:
            select.select([self._connection], [], [], patience)
        messages: list[Any] = []
        while True:
            try:
                # Asked without waiting, between two steps: a thread that waits would take the interpreter from them.
                data = self._connection.recv(_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the server is gone")
            messages += self._unpacker.feed(data)
            if len(data) < _AT_ONCE:
                return messages

    def end_with_peer(self) -> None:
        """Ends this process at once when the other end is gone, whatever it does then."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._connection, 0)  # of which nothing but the end is told
            poll.poll()
            os._exit(0)

        threading.Thread(target=watch, name="server's end", daemon=True).start()
