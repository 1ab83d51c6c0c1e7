"""Where the time of a start goes: one part after the other, so that the parts add up to the whole."""

from __future__ import annotations

import time


class Phases:
    """Seconds of each part since `begin`, in the order in which they first ended."""

    def __init__(self, begin: float | None = None) -> None:
        """`begin` is a moment of `time.monotonic`; without it, now."""
        self.seconds: dict[str, float] = {}
        self._end = time.monotonic() if begin is None else begin

    def end(self, name: str, at: float | None = None) -> None:
        """All that has passed since the last call was a part of `name`, until the moment `at` or now."""
        now = time.monotonic() if at is None else at
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._end
        self._end = now
