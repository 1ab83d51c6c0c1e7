"""A transport without a socket: what a client has not read stays in memory, where a test can count it."""

from __future__ import annotations

import asyncio
from typing import Any


class Unsent(asyncio.Transport):
    """What its client has not read is in `pinned_by`; whether the server reads, and how it ended, is seen too."""

    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.held = b""
        self.is_reading, self.is_closed, self.is_aborted = True, False, False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True
