"""Delay of the event loop: all clients wait for it while one request occupies the loop."""

from __future__ import annotations

import asyncio
import contextlib

from ostinato.observe.histograms import Histogram

STALL = 0.02
"""Seconds that no request may hold the loop for."""
_INTERVAL = 0.05
"""Seconds between two checks. A longer stall is always seen; a shorter one in proportion to its length."""
_BOUNDS = (0.001, 0.005, STALL, 0.05, 0.1, 0.25, 1.0, 5.0)


class EventLoopLag:
    """Monitor that asks to be called at certain times, and records how much later that happens."""

    def __init__(self) -> None:
        self.seconds = Histogram(_BOUNDS)
        self.longest = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_stalls(self) -> int:
        """Number of checks that came later than `STALL`."""
        counts = self.seconds.cumulative()
        return counts[-1] - counts[_BOUNDS.index(STALL)]

    def start(self) -> None:
        """Watch the running loop."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            late = max(0.0, clock() - due)
            self.seconds.observe(late)
            self.longest = max(self.longest, late)
