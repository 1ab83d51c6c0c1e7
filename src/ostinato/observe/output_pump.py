"""Standard output and error that never block: threads pass on what is written, and drop what is not read.

A full pipe stops its writers, and so would stop the server with its logs. All that the process and its
children write (logs, warnings, prints, messages of libraries) goes through a pump where it would end in a pipe or a
socket. Files take everything, and a terminal is stopped on purpose.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator

log = logging.getLogger("ostinato.serve")

MAX_UNREAD = 2**20
"""Bytes that wait for a reader, besides those in its pipe. What comes later is dropped."""
FLUSH_SECONDS = 2.0
"""Seconds that the output has at the end to be read."""


class OutputPump:
    """Pipe in place of a file descriptor, which one thread empties at once while another writes to the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        """Lines that were dropped since the start."""
        self._descriptor, self._target = descriptor, os.dup(descriptor)
        self._reading, writing = os.pipe()
        os.dup2(writing, descriptor)
        os.close(writing)
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._has_ended = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Put the descriptor back, and write what is left. What is not read within `FLUSH_SECONDS` is dropped."""
        os.dup2(self._target, self._descriptor)
        reader, writer = self._threads
        reader.join(FLUSH_SECONDS)  # to the end of all processes that have the pipe
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        writer.join(FLUSH_SECONDS)
        if writer.is_alive():
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._descriptor)

    def _read(self) -> None:
        with open(self._reading, "rb", buffering=0) as pipe:
            while data := pipe.read(2**16):
                with self._changed:
                    if self._size + len(data) > MAX_UNREAD:
                        self.dropped += data.count(b"\n")
                    else:
                        self._size += len(data)
                        self._waiting.append(data)
                        self._changed.notify()

    def _write(self) -> None:
        reported = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._has_ended)
                if not self._waiting:
                    os.close(self._target)
                    return
                data = self._waiting.popleft()
            self._write_all(data)
            with self._changed:
                self._size -= len(data)
            if self.dropped > reported and not self._waiting:
                log.warning("%d lines were dropped here, since they were not read", self.dropped - reported)
                reported = self.dropped

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._target, left) :]
            except BlockingIOError:  # another process, which has the descriptor too, wants it so
                select.select([], [self._target], [])
            except OSError:  # its reader has ended
                self.dropped += data.count(b"\n")
                return


@contextlib.contextmanager
def unblocked_output() -> Iterator[Callable[[], int]]:
    """Put pumps in place of standard output and error, where they may block; yield a function of the lines dropped."""
    pumps: list[OutputPump] = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                pumps.append(OutputPump(descriptor))
    try:
        yield lambda: sum(pump.dropped for pump in pumps)
    finally:
        for pump in pumps:
            pump.close()
