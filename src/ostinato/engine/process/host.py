"""What an engine's process does: the loop of steps, and of messages between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from ostinato.engine.engine import Engine
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.process.channel import Channel
from ostinato.engine.process.delivery import Gains, OutputDelta, Pace
from ostinato.engine.process.failures import of_step, portable
from ostinato.engine.process.messages import Abort, Ask, Compile, Gained, Observation, Question, Reply, Settled, Submit
from ostinato.sample.grammar import Grammar

_GLANCE = 0.005
"""Seconds between looks at a guide that is being compiled, while there is nothing else to do."""

log = logging.getLogger("ostinato.engine")


class Host:
    """Runs steps while requests are unfinished, and waits for messages otherwise; between two steps it takes in those
    that have come. What steps give is handed over at `Pace`."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._gains, self._pace = Gains(), Pace()
        self._replies: list[Reply] = []
        # One at a time, away from steps: as many as clients ask for would take the processor from them.
        self._compiler = ThreadPoolExecutor(1, "guides")
        self._compiling: dict[str, tuple[Future[Grammar], Submit | None]] = {}
        """By the id of who waits for it; with the request that begins when it is done."""
        self._questions: dict[Question, Callable[[], Any]] = {"observe": self._observe, "check": self._check}

    def run(self) -> None:
        """Serves until the server is gone (EOFError, OSError) or something breaks the engine, which is raised."""
        while True:
            for message in self._channel.receive(self._patience()):
                self._take(message)
            self._take_compiled()
            if self._engine.has_unfinished:
                self._step()
            messages: list[Reply | Gained] = [*self._replies]
            self._replies.clear()
            if self._gains and (self._pace.allows(self._gains.is_urgent) or not self._engine.has_unfinished):
                self._pace.sent()
                messages.append(Gained([_told(delta) for delta in self._gains.take()]))
            if messages:
                self._channel.send(*messages)

    def _patience(self) -> float | None:
        if self._engine.has_unfinished or self._gains:
            return 0
        return _GLANCE if self._compiling else None

    def _take(self, message: Any) -> None:
        match message:
            case Submit():
                if message.params.guide is None:
                    self._reply(message.request_id, partial(self._add, message))
                else:
                    compiled = self._compiler.submit(self._engine.compile_guide, message.params.guide)
                    self._compiling[message.request_id] = compiled, message
            case Abort(request_id):
                if self._compiling.pop(request_id, None) is None:
                    self._engine.abort(request_id)
                    self._gains.drop(request_id)
            case Settled(cost):
                self._pace.settled(cost)
            case Compile(call_id, guide):
                self._compiling[call_id] = self._compiler.submit(self._engine.compile_guide, guide), None
            case Ask(call_id, question):
                self._reply(call_id, self._questions[question])
            case _:
                raise TypeError(f"no such message: {message!r}")

    def _take_compiled(self) -> None:
        for call_id, (compiled, request) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[call_id]
                self._reply(call_id, partial(self._use, compiled, request))

    def _use(self, compiled: Future[Grammar], request: Submit | None) -> None:
        grammar = compiled.result()
        if request is not None:
            self._add(request, grammar)

    def _add(self, request: Submit, grammar: Grammar | None = None) -> None:
        self._engine.add(
            request.prompt_token_ids,
            request.params,
            request_id=request.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar=grammar,
            media=request.media,
        )

    def _reply(self, call_id: str, work: Callable[[], Any]) -> None:
        try:
            reply = Reply(call_id, work())
        except Exception as error:
            reply = Reply(call_id, error=portable(error))
        self._replies.append(reply)

    def _step(self) -> None:
        failed = self._engine.scheduler.counters.failed_steps
        outputs = self._engine.step()
        self._gains.note(outputs)
        has_failed = self._engine.scheduler.counters.failed_steps > failed
        _log_errors(outputs, has_failed)
        if has_failed:
            # Its requests have failed; nobody else's may be served from bookkeeping that it has left in disorder.
            self._engine.scheduler.check_integrity()

    def _observe(self) -> Observation:
        return Observation(self._engine.stats(), self._engine.meter)

    def _check(self) -> int:
        scheduler = self._engine.scheduler
        scheduler.check_integrity()
        return len(self._compiling) + self._gains.num_kept + scheduler.num_waiting + scheduler.num_running


def _told(delta: OutputDelta) -> OutputDelta:
    """As the server needs it: it knows the prompt and has got its log-probabilities, and errors have to be such as it
    can read."""
    output = delta.output
    if output is None:
        return delta
    error = None if output.error is None else of_step(output.error)
    return delta._replace(output=replace(output, prompt_token_ids=[], prompt_logprobs=None, error=error))


def _log_errors(outputs: Sequence[RequestOutput], has_step_failed: bool) -> None:
    errors = {output.request_id: output.error for output in outputs if output.error is not None and output.finished}
    if has_step_failed:
        cause = next(iter(errors.values()), None)
        log.error("a step failed, and %d requests with it", len(errors), exc_info=cause)
        return
    for request_id, error in errors.items():
        log.error("request %s failed: %s", request_id, error)
