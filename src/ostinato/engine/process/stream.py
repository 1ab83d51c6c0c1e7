"""One request of an AsyncEngine, as its caller on the event loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ostinato.engine.move.form import RequestSnapshot
from ostinato.engine.outputs import RequestTimes
from ostinato.engine.process.delivery import OutputDelta
from ostinato.errors import RequestError
from ostinato.schedule.batch import TokenLogprobs


class DeadlineExceeded(RequestError):
    """Error for a request that was ended because its deadline passed."""


class RequestStream:
    """An asynchronous iterator over a request's output deltas. Leaving its `async with` early ends the request.

    Deltas that the caller has not fetched are joined, so at most the request's whole output waits for a slow caller. An
    error that ended the request, or one of its outputs, is raised after all deltas were fetched.
    """

    def __init__(self, request_id: str, num_outputs: int, abort: Callable[[], None], client: str | None = None) -> None:
        self.request_id, self.client = request_id, client
        self.num_outputs = num_outputs
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        """Log-probabilities of the prompt, if asked for; None before the first token of the first output."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that came from the prefix cache; None before the first delta."""
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
        self._waiting: OutputDelta | None = None
        self._error: Exception | None = None
        self._updated = asyncio.Event()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        while self._waiting is None:
            if self.ended:
                self.raise_error()
                raise StopAsyncIteration
            self._updated.clear()
            await self._updated.wait()
        delta, self._waiting = self._waiting, None
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

    def rebind(self, request_id: str, abort: Callable[[], None]) -> None:
        """Continue with another engine, under this id."""
        self.request_id, self._abort = request_id, abort

    def restore(self, moved: RequestSnapshot) -> None:
        """Note what another engine has already given of the request."""
        first = moved.samples[0]
        self.prompt_token_ids = moved.prompt_token_ids
        if first.token_ids:
            self.prompt_logprobs = moved.prompt_logprobs
        if first.cache is not None:
            self.num_cached_tokens = first.cache.cached_tokens
        self.num_output_tokens = sum(len(each.token_ids) for each in moved.samples)
        self.finish_reasons = [each.finish_reason for each in moved.samples if each.finish_reason is not None]

    def put(self, delta: OutputDelta) -> None:
        """Add an output delta of the request. Called for the engine."""
        self.num_cached_tokens, self.times = delta.num_cached_tokens, delta.times
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.output is not None:
            # The engine's process did not send these back.
            delta.output.prompt_token_ids = self.prompt_token_ids
            delta.output.prompt_logprobs = None if self.prompt_logprobs is None else list(self.prompt_logprobs)
        for sample in delta.samples:
            self.num_output_tokens += len(sample.token_ids)
            if sample.finish_reason is not None:
                self.finish_reasons.append(sample.finish_reason)
        self._waiting = delta if self._waiting is None else self._waiting.then(delta)
        self._updated.set()

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
