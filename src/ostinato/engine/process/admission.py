"""How many requests may be unfinished at a time, and when one that was turned away should come again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from ostinato.errors import RequestError

WINDOW = 60.0
"""Seconds over which the drain rate is measured."""
LONGEST_RETRY = 600


class Overloaded(RequestError):
    """The queue is full. `retry_after`: seconds after which there is likely to be room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Admission:
    """Counts unfinished outputs against a bound: those that run at a time and those that may wait."""

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.num_unfinished = 0
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=256)

    def check(self, count: int) -> None:
        """Overloaded if `count` outputs find no room; RequestError if they never will."""
        bound = self.max_running + self.max_waiting
        if count > bound:
            raise RequestError(f"{count} outputs are asked for at once, and at most {bound} may be unfinished")
        if self.num_unfinished + count > bound:
            raise Overloaded(
                f"the queue is full: {self.num_unfinished} outputs are unfinished, {self.max_running} may run and "
                f"{self.max_waiting} wait",
                self.retry_after(count),
            )

    def enter(self, count: int) -> None:
        """Takes `count` outputs in; raises what `check` raises, and then nothing is changed."""
        self.check(count)
        self.num_unfinished += count

    def give_back(self, count: int) -> None:
        """`count` outputs that entered were refused, and so have not begun."""
        self.num_unfinished -= count

    def leave(self, count: int) -> None:
        """`count` outputs have ended."""
        self.num_unfinished -= count
        self._ended.extend([self._clock()] * count)

    def drain_rate(self) -> float | None:
        """Outputs that ended per second lately; None if that is not known."""
        now = self._clock()
        while self._ended and self._ended[0] < now - WINDOW:
            self._ended.popleft()
        if len(self._ended) < 2:
            return None
        return len(self._ended) / max(now - self._ended[0], 1e-3)

    def retry_after(self, count: int = 1) -> int:
        """Whole seconds until `count` more outputs are likely to find room: those too many, at the drain rate."""
        too_many = self.num_unfinished + count - self.max_running - self.max_waiting
        rate = self.drain_rate()
        if too_many <= 0 or rate is None:
            return 1
        return max(1, min(math.ceil(too_many / rate), LONGEST_RETRY))
