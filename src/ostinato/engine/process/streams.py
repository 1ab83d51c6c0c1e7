"""The requests of an AsyncEngine that have not ended: how their streams begin, what they are handed, how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ostinato.engine.process.admission import Admission
from ostinato.engine.process.delivery import OutputDelta, before_move
from ostinato.engine.process.messages import Abort, Settled
from ostinato.engine.process.stream import DeadlineExceeded, Stream
from ostinato.schedule.request import FinishReason

_TURNS = 3
"""Turns of the event loop until a gain has left the server: its reader is woken, forwards it, sends it."""


class Streams:
    """The stream of each unfinished request, by its id. Those that the engine has not taken in yet are *entering*.
    Used on one event loop."""

    def __init__(self, admission: Admission, send: Callable[[Any], None]) -> None:
        """`admission` counts the outputs in and out; `send` is for messages to the engine."""
        self._admission, self._send = admission, send
        self._loop = asyncio.get_running_loop()
        self._unfinished: dict[str, Stream] = {}
        self._entering: set[str] = set()
        self._num_ids = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    def __iter__(self) -> Iterator[str]:
        return iter(self._unfinished)

    def get(self, request_id: str) -> Stream | None:
        return self._unfinished.get(request_id)

    def all(self) -> list[Stream]:
        return list(self._unfinished.values())

    def is_entering(self, request_id: str) -> bool:
        return request_id in self._entering

    def new_id(self) -> str:
        self._num_ids += 1
        return f"async-{self._num_ids}"

    def open(self, num_outputs: int, client: str | None, deadline: float | None) -> Stream:
        """The stream of a new request, to be taken in by `entering`. `deadline`: seconds from now. Raises what
        `Admission.enter` raises."""
        self._admission.enter(num_outputs, client)
        name = self.new_id()
        stream = Stream(name, num_outputs, lambda: self.end(name), client)
        if deadline is not None:
            stream.deadline = self._loop.time() + deadline, deadline
        return stream

    def go_on(self, stream: Stream) -> None:
        """A stream that belonged to another engine goes on with a request of this one, to be taken in by `entering`.
        Raises what `Admission.enter` raises."""
        self._admission.enter(stream.num_outputs, stream.client)
        name = self.new_id()
        stream.pass_on(name, lambda: self.end(name))

    @contextmanager
    def entering(self, stream: Stream, *, ends: bool) -> Iterator[None]:
        """While the engine is handed the request of a stream. If it refuses, the stream belongs to no engine, and
        `ends` or may go on with another one."""
        name = stream.request_id
        self._unfinished[name] = stream
        self._entering.add(name)
        if stream.deadline is not None:
            stream.timer = self._loop.call_at(stream.deadline[0], self.expire, name, stream.deadline[1])
        try:
            yield
        except BaseException as error:
            if self._unfinished.pop(name, None) is not None:  # else it ended meanwhile, and was counted out
                self._admission.give_back(stream.num_outputs, stream.client)
                _let_go(stream)
                if ends:
                    stream.end()
            if not isinstance(error, Exception):
                self.abandon(name)  # cancelled: it may have been added, or soon be
            raise
        finally:
            self._entering.discard(name)

    def deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """Hands each stream what its request has gained."""
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
        self._settle(begin, _TURNS)

    def end(self, request_id: str, error: Exception | None = None) -> None:
        """Ends a request before its time; it may have ended already."""
        if request_id in self._unfinished:
            self.finish(request_id, error)
            self.abandon(request_id)

    def finish(self, request_id: str, error: Exception | None = None) -> None:
        """A request has ended."""
        stream = self._unfinished.pop(request_id)
        stream.end(error)
        self._admission.leave(stream.num_outputs, stream.client)

    def expire(self, request_id: str, deadline: float) -> None:
        """Its deadline has passed."""
        self.end(request_id, DeadlineExceeded(f"the request did not end within its deadline of {deadline:g} seconds"))

    def abandon(self, request_id: str) -> None:
        """Has the engine drop a request that nobody waits for."""
        self._send(Abort(request_id))

    def _hand_over(self, stream: Stream, handover: asyncio.Future[bool], delta: OutputDelta) -> None:
        """The last gain of a request that another engine may go on with."""
        assert delta.output is not None, "a request has an output when it ends"
        passes = any(each.finish_reason == FinishReason.MOVED.value for each in delta.output.outputs)
        if not passes:
            stream.put(delta)
            self.finish(delta.request_id, delta.output.error)  # which says so
            return
        gained = before_move(delta)
        if gained is not None:
            stream.put(gained)
        del self._unfinished[delta.request_id]
        self._admission.leave(stream.num_outputs, stream.client)
        _let_go(stream)
        if not handover.done():
            handover.set_result(True)

    def _settle(self, begin: float, turns: int) -> None:
        """Measures what gains cost the loop until those who wait for them have had their turn."""
        if turns:
            self._loop.call_soon(self._settle, begin, turns - 1)
        else:
            self._send(Settled(time.thread_time() - begin))


def _let_go(stream: Stream) -> None:
    """A stream belongs to no engine: if its reader leaves now, no engine is told."""
    stream.pass_on(stream.request_id, stream.end)
    if stream.timer is not None:
        stream.timer.cancel()
        stream.timer = None
