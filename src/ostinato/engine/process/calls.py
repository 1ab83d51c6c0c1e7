"""Calls to the engine that it has not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ostinato.engine.process.messages import Query, CompileGuide, ExportRequest, ImportRequest, QueryKind, SubmitRequest


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

    def send(self, name: str, message: SubmitRequest | ImportRequest | ExportRequest | CompileGuide | Query) -> asyncio.Future[Any]:
        """Send a call and return a future of its answer."""
        future = self._unanswered[name] = self._loop.create_future()
        future.add_done_callback(lambda _: self._unanswered.pop(name, None))
        self._send(message)
        return future

    def ask(self, question: QueryKind) -> asyncio.Future[Any]:
        name = self.new_call_id("question")
        return self.send(name, Query(name, question))

    def resolve(self, name: str, result: Any, error: BaseException | None) -> None:
        """Resolve the call's future with the engine's answer, unless the call was cancelled."""
        if (future := self._unanswered.get(name)) is not None:
            set_future(future, result, error)

    def fail_all(self, error: Exception) -> None:
        """Fail all calls, since the engine will not answer any more."""
        for future in list(self._unanswered.values()):
            set_future(future, None, error)


def set_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the future's result or error, unless it is done or cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
