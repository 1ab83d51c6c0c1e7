"""Admission control: bounds on the unfinished requests of all clients and of each, and retry times."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from ostinato.errors import Overloaded, RequestError
from ostinato.scheduler.request_queues import weighted_share

RATE_WINDOW_SECONDS = 60.0
"""Seconds over which the drain rate is measured."""
MAX_RETRY_SECONDS = 600


class QueueLimit:
    """Counter of unfinished outputs, bounded by the running and the waiting ones together.

    The unfinished outputs of each client are bounded by its share.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
        max_per_client: int | None = None,
    ) -> None:
        """Create an empty counter. `max_per_client` is for a client of weight 1; None for no bound per client."""
        self.max_running, self.max_waiting = max_running, max_waiting
        self.max_per_client = max_per_client
        self.num_unfinished = 0
        self._of_client: Counter[str] = Counter()
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=256)

    def check(self, count: int, client: str | None = None) -> None:
        """Raise Overloaded if there is no room for `count` outputs; RequestError if there never will be."""
        bound = self.max_running + self.max_waiting
        if count > bound:
            raise RequestError(f"{count} outputs are asked for at once, and at most {bound} may be unfinished")
        if self.num_unfinished + count > bound:
            raise Overloaded(
                f"the queue is full: {self.num_unfinished} outputs are unfinished, {self.max_running} may run and "
                f"{self.max_waiting} wait",
                self.retry_after(count),
            )
        if self.max_per_client is None or client is None:
            return
        share = weighted_share(self.max_per_client, bound, client)
        if count > share:
            raise RequestError(
                f"{count} outputs are asked for at once, and of one client at most {share} may be unfinished "
                "(max_requests_per_client, times its key's weight)"
            )
        if self._of_client[client] + count > share:
            raise Overloaded(
                f"{self._of_client[client]} outputs of this client are unfinished, and at most {share} may be "
                "(max_requests_per_client, times its key's weight)",
                self._seconds_for(self._of_client[client] + count - share),
            )

    def acquire(self, count: int, client: str | None = None) -> None:
        """Admit `count` outputs, or raise what `check` raises and change nothing."""
        self.check(count, client)
        self.num_unfinished += count
        if client is not None:
            self._of_client[client] += count

    def cancel(self, count: int, client: str | None = None) -> None:
        """Free the room of `count` admitted outputs that were refused, and so have not begun."""
        self.num_unfinished -= count
        if client is not None:
            self._of_client[client] -= count
            if not self._of_client[client]:
                del self._of_client[client]

    def release(self, count: int, client: str | None = None) -> None:
        """Free the room of `count` outputs that have ended."""
        self.cancel(count, client)
        self._ended.extend([self._clock()] * count)

    @property
    def num_clients(self) -> int:
        """Number of clients with unfinished outputs."""
        return len(self._of_client)

    def drain_rate(self) -> float | None:
        """Return how many outputs ended per second lately; None if that is not known."""
        now = self._clock()
        while self._ended and self._ended[0] < now - RATE_WINDOW_SECONDS:
            self._ended.popleft()
        if len(self._ended) < 2:
            return None
        return len(self._ended) / max(now - self._ended[0], 1e-3)

    def retry_after(self, count: int = 1) -> int:
        """Return the whole seconds until `count` more outputs are likely to fit: the excess, at the drain rate."""
        return self._seconds_for(self.num_unfinished + count - self.max_running - self.max_waiting)

    def _seconds_for(self, too_many: int) -> int:
        """Return the whole seconds until `too_many` outputs are likely to have ended."""
        rate = self.drain_rate()
        if too_many <= 0 or rate is None:
            return 1
        return max(1, min(math.ceil(too_many / rate), MAX_RETRY_SECONDS))
