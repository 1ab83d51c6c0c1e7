"""Calls to the engine that it has not answered yet, and the heartbeat of its loop.

The heartbeat asks the loop for its counts at intervals; an answer must come in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ostinato.engine.process.engine_messages import (
    CompileGuide,
    ExportRequest,
    ImportRequest,
    Query,
    QueryKind,
    StatsSnapshot,
    SubmitRequest,
)
from ostinato.errors import EngineFailed


class PendingCalls:
    """Table of messages that the engine answers, each under a unique name. Used on one event loop."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._unanswered: dict[str, asyncio.Future[Any]] = {}
        self._num_named = 0

    def __len__(self) -> int:
        return len(self._unanswered)

    def new_call_id(self, kind: str) -> str:
        """Return a name for a call that is not a request.

        Requests have separate numbers, which the heartbeat would change.
        """
        self._num_named += 1
        return f"{kind}-{self._num_named}"

    def send(
        self, name: str, message: SubmitRequest | ImportRequest | ExportRequest | CompileGuide | Query
    ) -> asyncio.Future[Any]:
        """Send a call and return a future of its answer."""
        future = self._unanswered[name] = self._loop.create_future()
        future.add_done_callback(lambda _: self._unanswered.pop(name, None))
        self._send(message)
        return future

    def ask(self, question: QueryKind) -> asyncio.Future[object]:
        name = self.new_call_id("question")
        return self.send(name, Query(name, question))

    def resolve(self, name: str, result: object, error: BaseException | None) -> None:
        """Resolve the call's future with the engine's answer, unless the call was cancelled."""
        if (future := self._unanswered.get(name)) is not None:
            set_future(future, result, error)

    def fail_all(self, error: Exception) -> None:
        """Fail all calls, since the engine will not answer any more."""
        for future in list(self._unanswered.values()):
            set_future(future, None, error)


def set_future(future: asyncio.Future[object], result: object, error: BaseException | None) -> None:
    """Set the future's result or error, unless it is done or cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


_ASKS_PER_TIMEOUT = 8
_MAX_PAUSE_SECONDS = 5.0
"""Longest time in seconds between two questions."""


class Heartbeat:
    """Watch over the engine, which is *stalled* after `timeout` seconds without an answer, until it answers again.

    A step that takes longer than that looks the same as a hang.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[StatsSnapshot]], timeout: float, on_change: Callable[[bool], None]
    ) -> None:
        """Start to watch. To be made, and used, on the event loop.

        `ask` is answered between two steps. `on_change` is called with True when the engine stalls, and with False when
        it answers again.
        """
        self.last: StatsSnapshot | None = None
        """Last answer of the engine."""
        self.is_stalled = False
        self._ask, self._timeout, self._on_change = ask, timeout, on_change
        self._loop = asyncio.get_running_loop()
        self._last_time = self._loop.time()
        self._task = self._loop.create_task(self._run())

    @property
    def age(self) -> float:
        """Seconds since the last answer."""
        return self._loop.time() - self._last_time

    def record(self, observation: StatsSnapshot) -> None:
        """Note an answer of the engine."""
        self.last, self._last_time = observation, self._loop.time()
        self._set(False)

    async def poll(self, patience: float) -> StatsSnapshot:
        """Return the engine's answer, or its last one if it does not answer within `patience` seconds."""
        if self.last is None:
            return await self._ask()
        if self.is_stalled:
            return self.last
        pending = asyncio.ensure_future(self._ask())
        done, _ = await asyncio.wait([pending], timeout=patience)
        if not done:
            pending.cancel()
            return self.last
        return await pending

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        pause = min(_MAX_PAUSE_SECONDS, self._timeout / _ASKS_PER_TIMEOUT)
        with suppress(EngineFailed):
            while True:
                pending = asyncio.ensure_future(self._ask())
                done, _ = await asyncio.wait([pending], timeout=self._timeout)
                if not done:
                    self._set(True)
                self.record(await pending)
                await asyncio.sleep(pause)

    def _set(self, is_stalled: bool) -> None:
        if self.is_stalled != is_stalled:
            self.is_stalled = is_stalled
            self._on_change(is_stalled)
