"""Streams of an AsyncEngine's unfinished requests: how they begin, get their deltas and end.

A stream is one request as its caller on the event loop sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from ostinato.engine.migration.wire_format import RequestSnapshot
from ostinato.engine.outputs import RequestTimes
from ostinato.engine.process.engine_messages import AbortRequest, DeltasHandled
from ostinato.engine.process.output_deltas import OutputDelta, PackedLogprobs, held_bytes, join_deltas, without_move
from ostinato.engine.process.queue_limit import QueueLimit
from ostinato.errors import BacklogExceeded, DeadlineExceeded
from ostinato.scheduler.request import FinishReason

_JOINED = 64
"""Deltas that are joined when their reader is slow, so that joining costs little and a fetch gives a bounded part."""


class RequestStream:
    """An asynchronous iterator over a request's output deltas. Leaving its `async with` early ends the request.

    Deltas that the caller has not fetched are joined, so at most the request's whole output waits for a slow caller. An
    error that ended the request, or one of its outputs, is raised after all deltas were fetched. `held_bytes` are those
    of what waits, and of what a caller has of the whole output until `close`; the registry limits them per client.
    """

    def __init__(self, request_id: str, num_outputs: int, abort: Callable[[], None], client: str | None = None) -> None:
        self.request_id, self.client = request_id, client
        self.num_outputs = num_outputs
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: PackedLogprobs | None = None
        """Log-probabilities of the prompt, if asked for; None before the first token of the first output."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that came from the prefix cache; None before the first delta."""
        self.num_created_tokens = 0
        """Prompt tokens after these and up to the last mark that is pinned."""
        self.unpinned_marks: tuple[int, ...] = ()
        """Block boundaries of the marks that got no pinned checkpoint."""
        self.num_output_tokens = 0
        """Number of tokens generated so far, by all outputs."""
        self.finish_reasons: list[str] = []
        """Reasons of the outputs that have ended."""
        self.ended = False
        """True once the engine has finished the request."""
        self.timer: asyncio.TimerHandle | None = None
        """Timer that ends the request at its deadline."""
        self.times: RequestTimes | None = None
        """Times of the request; None before the first delta."""
        self.on_error: Callable[[Exception], None] = lambda error: None
        """Callback for an error that ends the request."""
        self.deadline: tuple[float, float] | None = None
        """Time at which the request is ended, on the loop's clock, and the seconds that it had from its start."""
        self.exported: bytes | None = None
        """Export of a request whose outputs end with `moved`, for `AsyncEngine.import_` of another engine."""
        self.handover: asyncio.Future[bool] | None = None
        """Future during a migration that its reader does not notice.

        It is set when the last delta from the first engine has come: whether the request passes to the other one.
        """
        self._abort = abort
        self.held_bytes = 0
        """Bytes of the output that wait for the reader, or that it has whole until it closes the stream."""
        self.on_held: Callable[[int], None] = lambda num_bytes: None
        """Callback for a change of `held_bytes`."""
        self._recent: list[OutputDelta] = []
        self._waiting: deque[OutputDelta] = deque()
        """Joined deltas that came before `_recent`."""
        self._error: Exception | None = None
        self._updated = asyncio.Event()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while not (self._recent or self._waiting):
            if self.ended:
                self.raise_error()
                raise StopAsyncIteration
            self._updated.clear()
            await self._updated.wait()
        if self._waiting:
            delta = self._waiting.popleft()
        else:
            delta = join_deltas(self._recent)
            self._recent.clear()
        self.hold(-delta.num_bytes)
        return delta

    async def wait_ended(self) -> None:
        """Wait until nothing more will come, whether or not all deltas are fetched."""
        while not self.ended:
            self._updated.clear()
            await self._updated.wait()

    def raise_error(self) -> None:
        """Raise the error that ended the request, if one did."""
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """End the request, if it has not ended: its memory is free within one step."""
        if not self.ended:
            self._abort()

    def close(self) -> None:
        """End the request, if it has not ended, and drop what waits."""
        self.abort()
        self._drop()

    def cut(self, error: Exception) -> None:
        """Drop what waits, and end the request with an error, also for a reader that is still sending its output."""
        self.abort()
        self.end(error)
        self._drop()

    def _drop(self) -> None:
        self._recent.clear()
        self._waiting.clear()
        self.hold(-self.held_bytes)

    def hold(self, num_bytes: int) -> None:
        """Add to `held_bytes`, for what the reader keeps of a delta that it has fetched."""
        self.held_bytes += num_bytes
        self.on_held(num_bytes)

    def rebind(self, request_id: str, abort: Callable[[], None]) -> None:
        """Continue with another engine, under this id."""
        self.request_id, self._abort = request_id, abort

    def restore(self, snapshot: RequestSnapshot) -> None:
        """Note what another engine has already given of the request."""
        first = snapshot.samples[0]
        self.prompt_token_ids = snapshot.prompt_token_ids
        if first.token_ids:
            scores = snapshot.prompt_logprobs
            self.prompt_logprobs = None if scores is None else PackedLogprobs.of(scores)
        if first.cache is not None:
            self.num_cached_tokens, self.num_created_tokens = first.cache.cached_tokens, first.cache.created_tokens
            self.unpinned_marks = first.cache.unpinned_marks
        self.num_output_tokens = sum(len(sample.token_ids) for sample in snapshot.samples)
        self.finish_reasons = [sample.finish_reason for sample in snapshot.samples if sample.finish_reason is not None]

    def put(self, delta: OutputDelta) -> None:
        """Add an output delta of the request. Called for the engine."""
        self.num_cached_tokens, self.times = delta.num_cached_tokens, delta.times
        self.num_created_tokens, self.unpinned_marks = delta.num_created_tokens, delta.unpinned_marks
        num_bytes = delta.num_bytes
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
            num_bytes += delta.prompt_logprobs.num_bytes
        if delta.output is not None:
            # The engine's process did not send these back.
            delta.output.prompt_token_ids = self.prompt_token_ids
            delta.output.prompt_logprobs = cast(Any, self.prompt_logprobs)
            num_bytes += held_bytes(delta.output.outputs)
            num_bytes += 0 if delta.output.embedding is None else delta.output.embedding.nbytes
        for sample in delta.samples:
            self.num_output_tokens += len(sample.token_ids)
            if sample.finish_reason is not None:
                self.finish_reasons.append(sample.finish_reason)
        self._recent.append(delta)
        if len(self._recent) == _JOINED:
            self._waiting.append(join_deltas(self._recent))
            self._recent.clear()
        self._updated.set()
        self.hold(num_bytes)

    def end(self, error: Exception | None = None) -> None:
        """End the stream: nothing more will come. Called for the engine."""
        self.ended, self._error = True, error
        if self.handover is not None and not self.handover.done():
            self.handover.set_result(False)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if error is not None:
            self.on_error(error)
        self._updated.set()


class BacklogLimit:
    """Bound on the bytes of output that one client has asked for and not taken.

    Beyond it, the client's stream that holds most is cut. Requests without a client are not bounded.
    """

    def __init__(self) -> None:
        self.max_bytes: int | None = None
        """Bytes of a client; None: any number."""
        self.held_bytes: Counter[str] = Counter()
        """Bytes held, by client."""
        self._streams: dict[str, set[RequestStream]] = {}

    def note(self, stream: RequestStream, num_bytes: int) -> None:
        """Note that a stream holds `num_bytes` more, or less."""
        if stream.client is None:
            return
        client, streams = stream.client, self._streams.setdefault(stream.client, set())
        self.held_bytes[client] += num_bytes
        (streams.add if stream.held_bytes else streams.discard)(stream)
        if not streams:
            del self._streams[client], self.held_bytes[client]
        elif num_bytes > 0 and self.max_bytes is not None and self.held_bytes[client] > self.max_bytes:
            message = (
                f"the client has not taken {self.held_bytes[client]} bytes of its answers, and may leave "
                f"{self.max_bytes} (client_backlog); read streams as they come, or ask for less by n, max_tokens or "
                "logprobs"
            )
            max(streams, key=lambda other: other.held_bytes).cut(BacklogExceeded(message))


_LOOP_PASSES = 3
"""Iterations of the event loop until a delta has left the server: its reader is woken, forwards it, sends it."""


class StreamRegistry:
    """Streams of unfinished requests by id, for one event loop. Those not yet added to the engine are *entering*."""

    def __init__(self, queue_limit: QueueLimit, send: Callable[[Any], None]) -> None:
        """Create an empty table. `queue_limit` counts the unfinished outputs; `send` is for messages to the engine."""
        self._queue_limit, self._send = queue_limit, send
        self.backlog = BacklogLimit()
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
        self._queue_limit.acquire(num_outputs, client)
        request_id = self.new_id()
        stream = RequestStream(request_id, num_outputs, lambda: self.end(request_id), client)
        stream.on_held = partial(self.backlog.note, stream)
        if deadline is not None:
            stream.deadline = self._loop.time() + deadline, deadline
        return stream

    def reattach(self, stream: RequestStream) -> None:
        """Give a stream of another engine's request an id here, so that `submitting` can add its request here.

        Raises what `QueueLimit.acquire` raises.
        """
        self._queue_limit.acquire(stream.num_outputs, stream.client)
        request_id = self.new_id()
        stream.rebind(request_id, lambda: self.end(request_id))

    @contextmanager
    def submitting(self, stream: RequestStream, *, ends: bool) -> Iterator[None]:
        """Mark the stream as entering while its request is handed to the engine.

        If the engine refuses, the stream belongs to no engine. It ends if `ends`, else it may continue with another
        one.
        """
        request_id = stream.request_id
        self._unfinished[request_id] = stream
        self._entering.add(request_id)
        if stream.deadline is not None:
            stream.timer = self._loop.call_at(stream.deadline[0], self.expire, request_id, stream.deadline[1])
        try:
            yield
        except BaseException as error:
            # If it is gone, it ended meanwhile, and is not counted any more.
            if self._unfinished.pop(request_id, None) is not None:
                self._queue_limit.cancel(stream.num_outputs, stream.client)
                _detach(stream)
                if ends:
                    stream.end()
            if not isinstance(error, Exception):
                self.abandon(request_id)  # cancelled: the engine may have added it, or will soon
            raise
        finally:
            self._entering.discard(request_id)

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
            if delta.output is not None and not stream.ended:
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
        self._queue_limit.release(stream.num_outputs, stream.client)

    def expire(self, request_id: str, deadline: float) -> None:
        """End a request whose deadline has passed."""
        self.end(request_id, DeadlineExceeded(f"the request did not end within its deadline of {deadline:g} seconds"))

    def abandon(self, request_id: str) -> None:
        """Have the engine drop an abandoned request."""
        self._send(AbortRequest(request_id))

    def _hand_over(self, stream: RequestStream, handover: asyncio.Future[bool], delta: OutputDelta) -> None:
        """Handle the last delta of a request that another engine may continue."""
        assert delta.output is not None, "a request has an output when it ends"
        passes = any(sample.finish_reason == FinishReason.MOVED.value for sample in delta.output.outputs)
        if not passes:
            stream.put(delta)
            if not stream.ended:
                self.finish(delta.request_id, delta.output.error)  # the request ended by itself
            return
        gained = without_move(delta)
        if gained is not None:
            stream.put(gained)
        del self._unfinished[delta.request_id]
        self._queue_limit.release(stream.num_outputs, stream.client)
        _detach(stream)
        if not handover.done():
            handover.set_result(True)

    def _settle(self, begin: float, passes: int) -> None:
        """Measure what deltas cost the loop until their readers have run, and report it to the engine."""
        if passes:
            self._loop.call_soon(self._settle, begin, passes - 1)
        else:
            self._send(DeltasHandled(time.thread_time() - begin))


def _detach(stream: RequestStream) -> None:
    """Detach a stream from its engine: if its reader leaves now, no engine hears of it."""
    stream.rebind(stream.request_id, stream.end)
    if stream.timer is not None:
        stream.timer.cancel()
        stream.timer = None
