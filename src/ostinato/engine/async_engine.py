"""AsyncEngine: the engine on a thread of its own, for many requests from one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ostinato.config import EngineConfig
from ostinato.engine.admission import Admission
from ostinato.engine.delivery import Gains, OutputDelta, Pace
from ostinato.engine.engine import Engine
from ostinato.engine.runner import StartProgress
from ostinato.engine.stream import DeadlineExceeded, Stream
from ostinato.errors import RequestError
from ostinato.sample.params import SamplingParams

T = TypeVar("T")


class EngineFailed(RuntimeError):
    """The engine cannot go on; its process should end."""


class AsyncEngine:
    """Serves requests of one event loop. Made by `start`; every method is called on the loop that it was started on.

    The engine's thread runs steps while requests are unfinished and waits for commands otherwise; between two steps it
    runs the commands that have come. What steps give is handed over at `Pace`.
    """

    def __init__(self, config: EngineConfig, max_waiting: int, progress: StartProgress) -> None:
        self._config, self._progress = config, progress
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._gains, self._pace = Gains(), Pace()
        self._num_submitted = 0
        self._stopping = False
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        """What ended the engine, if something has."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called on the loop when the engine has failed."""

    @classmethod
    async def start(
        cls, config: EngineConfig, *, max_waiting: int = 1024, progress: StartProgress = lambda what, done, total: None
    ) -> AsyncEngine:
        """Loads the model on the engine's thread and runs one request of one token, so that a step has succeeded.

        `max_waiting`: outputs that may wait besides those that run; more are Overloaded. Raises what `Engine` raises,
        and the error of the first step.
        """
        engine = cls(config, max_waiting, progress)
        engine._thread.start()
        await engine._started
        return engine

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> Stream:
        """Takes in a request (see `Engine.add`); returns its stream, to be used with `async with`.

        `deadline`: seconds from now after which the request is ended with DeadlineExceeded. Raises RequestError if it
        can never be served, Overloaded if too many wait, EngineFailed if the engine cannot go on.
        """
        self._check()
        params = params or self.engine.default_params()
        self.admission.enter(params.n)
        stream: Stream | None = None
        try:
            name = request_id if request_id is not None else self._new_id()
            if name in self._streams:
                raise RequestError(f"a request with the id {name!r} is unfinished; choose another id")
            stream = self._streams[name] = Stream(name, params.n, lambda: self._end(name))
            if isinstance(prompt, str):
                # Away from the loop, as a long prompt takes long; the tokenizer is safe to share.
                prompt = await asyncio.to_thread(self.engine.tokenizer.encode, prompt, add_special_tokens)
            stream.prompt_token_ids = list(prompt)
            await self.call(
                lambda: self.engine.add(
                    stream.prompt_token_ids, params, request_id=name, priority=priority, cache_salt=cache_salt
                )
            )
        except BaseException as error:
            self.admission.give_back(params.n)
            if stream is not None:
                del self._streams[name]
                stream.end()
            if isinstance(error, asyncio.CancelledError):
                self._abandon(name)  # it may have been added meanwhile, or soon be
            raise
        if deadline is not None:
            stream.timer = self._loop.call_later(deadline, self._expire, name, deadline)
        return stream

    async def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the engine's thread, between two steps, and returns what it returns."""
        self._check()
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                self._on_loop(_set, future, None, error)
            else:
                self._on_loop(_set, future, result, None)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(run)
        return await future

    async def stats(self) -> dict[str, Any]:
        """See `Engine.stats`."""
        return await self.call(self.engine.stats)

    async def stop(self) -> None:
        """Ends every request that is unfinished, and the thread."""
        for name in list(self._streams):
            self._end(name)
        self._stopping = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._refuse_calls(EngineFailed("the engine was stopped"))

    def _check(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._stopping:
            raise EngineFailed("the engine was stopped")

    def _new_id(self) -> str:
        self._num_submitted += 1
        return f"async-{self._num_submitted}"

    def _end(self, request_id: str, error: Exception | None = None) -> None:
        """Ends a request before its time; it may have ended already."""
        if request_id in self._streams:
            self._finish(request_id, error)
            self._abandon(request_id)

    def _finish(self, request_id: str, error: Exception | None = None) -> None:
        """A request has ended."""
        stream = self._streams.pop(request_id)
        stream.end(error)
        self.admission.leave(stream.num_outputs)

    def _abandon(self, request_id: str) -> None:
        """Has the engine drop a request that nobody waits for."""

        def drop() -> None:
            if self.engine.abort(request_id) is not None:
                self._gains.drop(request_id)

        self._commands.put(drop)

    def _expire(self, request_id: str, deadline: float) -> None:
        self._end(request_id, DeadlineExceeded(f"the request did not end within its deadline of {deadline:g} seconds"))

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """On the loop: hands each stream what its request has gained."""
        self._pace.arrived()
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
                if delta.output is not None:
                    self._finish(delta.request_id, delta.output.error)

    def _fail(self, error: BaseException) -> None:
        """On the loop: nothing will be computed any more."""
        self.failure = error
        for name in list(self._streams):
            self._finish(name, _failed(error))
        self._refuse_calls(_failed(error))
        self.on_failure()

    def _refuse_calls(self, error: Exception) -> None:
        for future in self._calls:
            _set(future, None, error)

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        try:
            self.engine = Engine(self._config, self._progress)
            settings = self.engine.plan.settings
            self.admission = Admission(settings.max_num_seqs, self._max_waiting)
            _first_step(self.engine)
        except BaseException as error:
            self._on_loop(_set, self._started, None, error)
            return
        self._on_loop(_set, self._started, None, None)
        try:
            while not self._stopping:
                self._run_commands(wait=not self.engine.has_unfinished and not self._gains)
                if self.engine.has_unfinished:
                    self._step()
                if self._gains and (self._pace.allows(self._gains.is_urgent) or not self.engine.has_unfinished):
                    self._pace.sent()
                    self._on_loop(self._deliver, self._gains.take())
        except BaseException as error:
            self._on_loop(self._fail, error)

    def _run_commands(self, wait: bool) -> None:
        """Runs the commands that have come; if it may `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=wait)()
                wait = False

    def _step(self) -> None:
        failed = self.engine.scheduler.counters.failed_steps
        self._gains.note(self.engine.step())
        if self.engine.scheduler.counters.failed_steps > failed:
            # Its requests have failed; nobody else's may be served from bookkeeping that it has left in disorder.
            self.engine.scheduler.check_integrity()

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs a function on the loop, if that has not ended before the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _failed(cause: BaseException) -> EngineFailed:
    error = EngineFailed("the engine has failed and serves no more requests")
    error.__cause__ = cause
    return error


def _set(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _first_step(engine: Engine) -> None:
    """One token behind one token: shows that the model runs. Raises what went wrong."""
    token = engine.tokenizer.bos_token_id
    engine.add([0 if token is None else token], SamplingParams(temperature=0, max_tokens=1), cache_salt="first step")
    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise output.error
