"""Clients' use of the processes that read large bodies: seconds and pixels, per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.serve.http.errors import ApiError

WINDOW = 60.0
"""Seconds in which a whole budget comes back."""
MAX_CLIENTS = 1024
"""Largest number of clients; beyond it, those that have used least are forgotten."""


@dataclass(slots=True)
class _Use:
    seconds: float = 0.0
    pixels: float = 0.0
    since: float = 0.0


class ClientQuota:
    """Use of each client, as leaky buckets.

    A client may use a whole budget at once, and gets it back within `WINDOW`. What it uses is known afterwards, so the
    last request may exceed the budget, and the next ones wait.
    """

    def __init__(self, seconds: float, pixels: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._pixels, self._clock = seconds, pixels, clock
        self._uses: dict[str, _Use] = {}

    def check(self, client: str) -> None:
        """Raise ApiError 429 for a client that has used all it may."""
        use = self._leaked(client)
        if use is None:
            return
        over = max(use.seconds / self._seconds, use.pixels / self._pixels) - 1
        if over < 0:
            return
        name, most = "client_pixels", f"{self._pixels} pixels"
        if use.seconds / self._seconds > use.pixels / self._pixels:
            name, most = "client_seconds", f"{self._seconds:g} seconds"
        retry = {"Retry-After": str(max(1, math.ceil(over * WINDOW)))}
        message = f"large bodies and images of this client have taken more than {most} within a minute ({name})"
        raise ApiError(429, message, code="client_budget", headers=retry)

    def charge(self, client: str, seconds: float, pixels: int) -> None:
        """Add to what a client has used."""
        use = self._leaked(client) or self._uses.setdefault(client, _Use(since=self._clock()))
        use.seconds += seconds
        use.pixels += pixels
        if len(self._uses) > MAX_CLIENTS:
            by_use = sorted(self._uses, key=self._share)
            for each in by_use[: MAX_CLIENTS // 2]:
                del self._uses[each]

    def _leaked(self, client: str) -> _Use | None:
        use = self._uses.get(client)
        if use is None:
            return None
        now = self._clock()
        back = (now - use.since) / WINDOW
        use.seconds, use.pixels = (
            max(0.0, use.seconds - back * self._seconds),
            max(0.0, use.pixels - back * self._pixels),
        )
        use.since = now
        return use

    def _share(self, client: str) -> float:
        use = self._leaked(client)
        assert use is not None, "a client of those that are known"
        return max(use.seconds / self._seconds, use.pixels / self._pixels)
