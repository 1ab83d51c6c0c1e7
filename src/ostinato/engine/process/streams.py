"""Streams of an AsyncEngine's unfinished requests: how they begin, get their deltas and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ostinato.engine.process.admission import QueueLimit
from ostinato.engine.process.delivery import OutputDelta, without_move
from ostinato.engine.process.messages import AbortRequest, DeltasHandled
from ostinato.engine.process.stream import DeadlineExceeded, RequestStream
from ostinato.schedule.request import FinishReason

_LOOP_PASSES = 3
"""Iterations of the event loop until a delta has left the server: its reader is woken, forwards it, sends it."""


class StreamRegistry:
    """Streams of unfinished requests, by id. Those that the engine has not added yet are *entering*.

    Used on one event loop.
    """

    def __init__(self, admission: QueueLimit, send: Callable[[Any], None]) -> None:
        """Create an empty table. `admission` counts the unfinished outputs; `send` is for messages to the engine."""
        self._admission, self._send = admission, send
        self._loop = asyncio.get_running_loop()
        self._unfinished: dict[str, RequestStream] = {}
        self._entering: set[str] = set()
        self._num_ids = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    def __iter__(self) -> Iterator[str]:
        return iter(self._unfinished)

    def get(self, request_id: str) -> RequestStream | None:
        return self._unfinished.get(request_id)

    def all(self) -> list[RequestStream]:
        return list(self._unfinished.values())

    def is_entering(self, request_id: str) -> bool:
        return request_id in self._entering

    def new_id(self) -> str:
        self._num_ids += 1
        return f"async-{self._num_ids}"

    def open(self, num_outputs: int, client: str | None, deadline: float | None) -> RequestStream:
        """Return the stream of a new request, whose request `submitting` then adds to the engine.

        `deadline` is in seconds from now. Raises what `QueueLimit.acquire` raises.
        """
        self._admission.acquire(num_outputs, client)
        name = self.new_id()
        stream = RequestStream(name, num_outputs, lambda: self.end(name), client)
        if deadline is not None:
            stream.deadline = self._loop.time() + deadline, deadline
        return stream

    def reattach(self, stream: RequestStream) -> None:
        """Give a stream of another engine's request an id here, so that `submitting` can add its request to this engine.

        Raises what `QueueLimit.acquire` raises.
        """
        self._admission.acquire(stream.num_outputs, stream.client)
        name = self.new_id()
        stream.rebind(name, lambda: self.end(name))

    @contextmanager
    def submitting(self, stream: RequestStream, *, ends: bool) -> Iterator[None]:
        """Mark the stream as entering while its request is handed to the engine.

        If the engine refuses, the stream belongs to no engine. It ends if `ends`, else it may continue with another
        one.
        """
        name = stream.request_id
        self._unfinished[name] = stream
        self._entering.add(name)
        if stream.deadline is not None:
            stream.timer = self._loop.call_at(stream.deadline[0], self.expire, name, stream.deadline[1])
        try:
            yield
        except BaseException as error:
            if self._unfinished.pop(name, None) is not None:  # else it ended meanwhile, and is not counted any more
                self._admission.cancel(stream.num_outputs, stream.client)
                _detach(stream)
                if ends:
                    stream.end()
            if not isinstance(error, Exception):
                self.abandon(name)  # cancelled: the engine may have added it, or will soon
            raise
        finally:
            self._entering.discard(name)

    def deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """Hand each stream its request's output delta."""
        begin = time.thread_time()
        for delta in deltas:
            stream = self._unfinished.get(delta.request_id)
            if stream is None:
                continue
            if delta.output is not None and stream.handover is not None:
                self._hand_over(stream, stream.handover, delta)
                continue
            stream.put(delta)
            if delta.output is not None:
                self.finish(delta.request_id, delta.output.error)
        self._settle(begin, _LOOP_PASSES)

    def end(self, request_id: str, error: Exception | None = None) -> None:
        """End a request early; it may have ended already."""
        if request_id in self._unfinished:
            self.finish(request_id, error)
            self.abandon(request_id)

    def finish(self, request_id: str, error: Exception | None = None) -> None:
        """End the stream of a request that has ended."""
        stream = self._unfinished.pop(request_id)
        stream.end(error)
        self._admission.release(stream.num_outputs, stream.client)

    def expire(self, request_id: str, deadline: float) -> None:
        """End a request whose deadline has passed."""
        self.end(request_id, DeadlineExceeded(f"the request did not end within its deadline of {deadline:g} seconds"))

    def abandon(self, request_id: str) -> None:
        """Have the engine drop an abandoned request."""
        self._send(AbortRequest(request_id))

    def _hand_over(self, stream: RequestStream, handover: asyncio.Future[bool], delta: OutputDelta) -> None:
        """Handle the last delta of a request that another engine may continue."""
        assert delta.output is not None, "a request has an output when it ends"
        passes = any(each.finish_reason == FinishReason.MOVED.value for each in delta.output.outputs)
        if not passes:
            stream.put(delta)
            self.finish(delta.request_id, delta.output.error)  # the request ended by itself
            return
        gained = without_move(delta)
        if gained is not None:
            stream.put(gained)
        del self._unfinished[delta.request_id]
        self._admission.release(stream.num_outputs, stream.client)
        _detach(stream)
        if not handover.done():
            handover.set_result(True)

    def _settle(self, begin: float, turns: int) -> None:
        """Measure what deltas cost the loop until their readers have run, and report it to the engine."""
        if turns:
            self._loop.call_soon(self._settle, begin, turns - 1)
        else:
            self._send(DeltasHandled(time.thread_time() - begin))


def _detach(stream: RequestStream) -> None:
    """Detach a stream from its engine: if its reader leaves now, no engine hears of it."""
    stream.rebind(stream.request_id, stream.end)
    if stream.timer is not None:
        stream.timer.cancel()
        stream.timer = None
