"""Times of the phases of a start. They follow one another, so that they add up to the whole."""

from __future__ import annotations

import time


class StartupTimer:
    """Seconds of each phase since `begin`, in the order in which they first ended."""

    def __init__(self, begin: float | None = None) -> None:
        """Start at `begin`, a moment of `time.monotonic`; without it, now."""
        self.seconds: dict[str, float] = {}
        self._end = time.monotonic() if begin is None else begin

    def end(self, name: str, at: float | None = None) -> None:
        """Add the time since the last call, up to the moment `at` or now, to phase `name`."""
        now = time.monotonic() if at is None else at
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._end
        self._end = now
