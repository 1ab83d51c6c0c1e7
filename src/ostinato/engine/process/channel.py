"""How messages pass between a server and its engine's process: as pickles, each after its length."""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

_LENGTH_BYTES = 8

_AT_ONCE = 2**18
"""Bytes read at a time."""


def pack(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Unpacker:
    """Messages out of bytes, however these are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        """Takes bytes in; yields the messages that are complete with them."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
            if len(self._bytes) < end:
                return
            with memoryview(self._bytes) as view:
                message = pickle.loads(view[_LENGTH_BYTES:end])
            del self._bytes[:end]
            yield message


class Channel:
    """The engine's end of the connection, a stream socket. It receives between steps, and sends from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = Unpacker()
        self._sending = threading.Lock()

    def send(self, *messages: Any) -> None:
        """Sends messages. Waits while the other end has not read earlier ones. OSError if it is gone."""
        data = b"".join(map(pack, messages))
        with self._sending:
            self._connection.sendall(data)

    def receive(self, patience: float | None) -> list[Any]:
        """The messages that have come. Waits `patience` seconds for the first one; None: as long as it takes.
        EOFError if the other end is gone."""
        if patience != 0:
            select.select([self._connection], [], [], patience)
        messages: list[Any] = []
        while True:
            try:
                # Without waiting, between two steps: a thread that waits would take the interpreter's lock.
                data = self._connection.recv(_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the server is gone")
            messages += self._unpacker.feed(data)
            if len(data) < _AT_ONCE:
                return messages

    def end_with_peer(self) -> None:
        """Ends this process at once when the other end is gone, whatever it is doing."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._connection, 0)  # reports only that the connection ended
            poll.poll()
            os._exit(0)

        threading.Thread(target=watch, name="server's end", daemon=True).start()
