"""AsyncEngine: the engine on a thread of its own, for many requests from one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ostinato.config import EngineConfig
from ostinato.engine.admission import Admission
from ostinato.engine.delivery import Gains, OutputDelta, Pace
from ostinato.engine.engine import Engine
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.runner import StartProgress
from ostinato.engine.stream import DeadlineExceeded, Stream
from ostinato.errors import OstinatoError, RequestError
from ostinato.sample.grammar import Grammar
from ostinato.sample.params import SamplingParams

T = TypeVar("T")

_LONGEST_STEP = 30.0
"""Seconds that stopping waits for the step that runs."""
_TURNS = 3
"""Turns of the event loop until who waits for a stream has done with what came: woken, forwarded, sent."""


log = logging.getLogger("ostinato.engine")


class EngineFailed(RuntimeError):
    """The engine cannot go on; its process should end."""


class EngineStopped(EngineFailed):
    """The engine was stopped, and what was unfinished with it."""


class StepFailed(RuntimeError):
    """An exception in a step ended the request; the engine goes on. Its cause is that exception."""


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

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        deadline: float | None = None,
        grammar: Grammar | None = None,
    ) -> Stream:
        """Takes in a request (see `Engine.add`); returns its stream, to be used with `async with`.

        `deadline`: seconds from now after which the request is ended with DeadlineExceeded. Raises RequestError if it
        can never be served, Overloaded if too many wait, EngineFailed if the engine cannot go on. Cancelled, it leaves
        nothing behind.
        """
        self._check()
        params = params or self.engine.default_params()
        self._check_length(prompt)
        self.admission.enter(params.n)
        name = self._new_id()
        stream = self._streams[name] = Stream(name, params.n, lambda: self._end(name))
        if deadline is not None:
            stream.timer = self._loop.call_later(deadline, self._expire, name, deadline)
        try:
            if isinstance(prompt, str):
                # Away from the loop, as a long prompt takes long; the tokenizer is safe to share.
                prompt = await asyncio.to_thread(self.engine.tokenizer.encode, prompt, add_special_tokens)
                stream.raise_error()  # it may have ended meanwhile, and then must not begin
                self._check()
            stream.prompt_token_ids = list(prompt)
            adding = self._call(
                lambda: self.engine.add(
                    stream.prompt_token_ids,
                    params,
                    request_id=name,
                    priority=priority,
                    cache_salt=cache_salt,
                    grammar=grammar,
                )
            )
            stream.on_error = lambda error: _set(adding, None, error)  # it may end while a long step runs
            await adding
        except BaseException as error:
            if self._streams.pop(name, None) is not None:  # else it ended meanwhile, and was counted out
                self.admission.give_back(params.n)
                stream.end()
            if not isinstance(error, Exception):
                self._abandon(name)  # cancelled: it may have been added, or soon be
            raise
        return stream

    async def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the engine's thread, between two steps, and returns what it returns."""
        self._check()
        return await self._call(command)

    def _call(self, command: Callable[[], T]) -> asyncio.Future[T]:
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
        return future

    async def stats(self) -> dict[str, Any]:
        """See `Engine.stats`."""
        return await self.call(self.engine.stats)

    async def stop(self) -> None:
        """Ends every request that is unfinished, with EngineStopped, and the thread."""
        self._stopping = True
        for name in list(self._streams):
            self._end(name, EngineStopped("the engine was stopped before the request had ended"))
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join, _LONGEST_STEP)
        self._refuse_calls(EngineStopped("the engine was stopped"))

    def _check(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._stopping:
            raise EngineStopped("the engine was stopped")

    def _check_length(self, prompt: str | Sequence[int]) -> None:
        """Refuses at once what is too long in any case, since to find out by tokenizing it may take seconds."""
        max_model_len = self.engine.plan.settings.max_model_len
        most = max_model_len * self.engine.tokenizer.longest_token if isinstance(prompt, str) else max_model_len
        if len(prompt) > most:
            unit = "characters" if isinstance(prompt, str) else "tokens"
            raise RequestError(
                f"the prompt has {len(prompt)} {unit}, and max_model_len ({max_model_len}) has room for at most {most}"
            )

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
            self.engine.abort(request_id)
            self._gains.drop(request_id)

        self._commands.put(drop)

    def _expire(self, request_id: str, deadline: float) -> None:
        self._end(request_id, DeadlineExceeded(f"the request did not end within its deadline of {deadline:g} seconds"))

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """On the loop: hands each stream what its request has gained."""
        begin = time.thread_time()
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
                if delta.output is not None:
                    self._finish(delta.request_id, _told(delta.output.error))
        self._settle(begin, _TURNS)

    def _settle(self, begin: float, turns: int) -> None:
        """Measures what gains cost the loop until those who wait for them have had their turn."""
        if turns:
            self._loop.call_soon(self._settle, begin, turns - 1)
        else:
            self._pace.settled(time.thread_time() - begin)

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
        outputs = self.engine.step()
        self._gains.note(outputs)
        has_failed = self.engine.scheduler.counters.failed_steps > failed
        _log_errors(outputs, has_failed)
        if has_failed:
            # Its requests have failed; nobody else's may be served from bookkeeping that it has left in disorder.
            self.engine.scheduler.check_integrity()

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs a function on the loop, if that has not ended before the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _told(error: Exception | None) -> Exception | None:
    """An error of a request, as its stream raises it. One of a step is that of many: each gets its own."""
    if error is None or isinstance(error, OstinatoError):
        return error
    told = StepFailed("the step that computed the request failed")
    told.__cause__ = error
    return told


def _log_errors(outputs: Sequence[RequestOutput], has_step_failed: bool) -> None:
    errors = {output.request_id: output.error for output in outputs if output.error is not None and output.finished}
    if has_step_failed:
        cause = next(iter(errors.values()), None)
        log.error("a step failed, and %d requests with it", len(errors), exc_info=cause)
        return
    for request_id, error in errors.items():
        log.error("request %s failed: %s", request_id, error)


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
