"""The engine's process: its step loop, which reads messages between two steps.

`python -m ostinato.engine.process.child FD` serves the process at the other end of the socket FD.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ostinato.child_process import die_with_parent, exit_with_peer
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.process.engine_messages import (
    AbortRequest,
    CacheEvents,
    Channel,
    CompileGuide,
    DeltasHandled,
    EngineCrashed,
    EngineReply,
    EngineStart,
    EngineStarted,
    ExportRequest,
    ImportRequest,
    LogLine,
    OutputDeltas,
    ProgressReport,
    Query,
    QueryKind,
    RequestExported,
    StatsSnapshot,
    SubmitRequest,
    picklable_error,
    step_error,
)
from ostinato.engine.process.engine_process import freeze_gc
from ostinato.engine.process.output_deltas import DeltaBuffer, DeltaPacer, OutputDelta, packed
from ostinato.kv_cache.cache_events import CacheEvent, CacheEventLog
from ostinato.kv_cache.index_snapshot import prefix_hit_keys, snapshot_index
from ostinato.kv_cache.offload.save_restore import SAVE_PATIENCE
from ostinato.observe.logs import set_log_levels
from ostinato.os_support import lack_of_address_space
from ostinato.sampling.grammar import Grammar
from ostinato.sampling.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore  # imports torch, whose errors must reach the server

_GLANCE = 0.005
"""Seconds between looks whether a guide has been compiled, while there is nothing else to do."""

_LOOK_AT_RANKS = 1.0
"""Seconds between looks whether the other ranks are alive, while there is nothing else to do."""

_LOOK_AT_FILES = 1.0
"""Seconds between looks whether the model's files were written to."""

_EVENT_PERIOD = 0.02
"""Seconds between two messages with events of the prefix index, while requests run."""

log = logging.getLogger("ostinato.engine")


def main(descriptor: int) -> None:
    """Make the engine that the first message asks for, and run it until the server is gone or the engine fails."""
    # A terminal or supervisor sends signals to all processes, but only the server should act on them.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()  # even if it is stopped
    connection = socket.socket(fileno=descriptor)
    engine: EngineCore | None = None

    def patience() -> float:
        return 0.0 if engine is None or engine.scheduler.cache.store.files is None else SAVE_PATIENCE

    exit_with_peer(connection, patience)
    channel = Channel(connection)
    try:
        start = _first_message(channel)
        _send_logs(channel, start.log_level)
        engine = start.make(start.config, lambda what, done, total: channel.send(ProgressReport(what, done, total)))
        _first_step(engine)
        spec = engine.spec
        default_params, size = engine.default_params(), spec.hidden_size
        channel.send(EngineStarted(engine.plan, engine.directory, default_params, spec.vocab_size, spec.vision, size))
        freeze_gc()
        EngineLoop(engine, channel).run()
    except BaseException as error:
        if not isinstance(error, EOFError | ConnectionError):
            channel.send(EngineCrashed(lack_of_address_space(error) or picklable_error(error)))
        elif engine is not None:  # the other end did not say so, or it would have asked for this
            engine.close(SAVE_PATIENCE)


def _first_message(channel: Channel) -> EngineStart:
    messages: list[EngineStart] = []
    while not messages:
        messages += channel.receive(None)
    [start] = messages
    return start


def _first_step(engine: EngineCore) -> None:
    """Compute one token, to show that the model runs. Raises the error if it does not."""
    token = engine.tokenizer.bos_token_id
    with engine.uncounted():
        engine.add_request(
            [0 if token is None else token], SamplingParams(temperature=0, max_tokens=1), cache_salt="first step"
        )
        while engine.has_unfinished:
            for output in engine.step():
                if output.error is not None:
                    raise output.error


class _LogForwarder(logging.Handler):
    """Handler that sends log records to the server, whose handlers write them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        forwarded_record = copy.copy(record)
        forwarded_record.msg, forwarded_record.args = record.getMessage(), None
        if record.exc_info:
            forwarded_record.exc_text, forwarded_record.exc_info = (
                logging.Formatter().formatException(record.exc_info),
                None,
            )
        with suppress(ConnectionError):  # nobody is left to read it
            self._channel.send(LogLine(forwarded_record))


def _send_logs(channel: Channel, level: int) -> None:
    logger = logging.getLogger("ostinato")
    logger.setLevel(level)
    logger.addHandler(_LogForwarder(channel))
    set_log_levels()
    logger.propagate = False


class EngineLoop:
    """Step loop of the engine's process. It runs steps while requests are unfinished, else it waits for messages.

    Messages are read between two steps. Replies to them are sent before the next step, and so are output deltas when
    `DeltaPacer` allows: a message that the server has handled the last ones counts at once, not a step later.
    """

    def __init__(self, engine: EngineCore, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._deltas, self._pace = DeltaBuffer(), DeltaPacer()
        self._replies: list[EngineReply | RequestExported] = []
        self._next_look = 0.0
        self._is_checking = False
        """True if the last thing that was done is a part of an online check."""
        self._reported_keys: frozenset[int] | None = None
        """Block hashes that were reported last."""
        self._cache_events: CacheEventLog | None = None
        """Log of the prefix index, if the server wants its events."""
        self._next_events = 0.0
        # One thread compiles one guide at a time: more would take processor time from steps.
        self._compiler = ThreadPoolExecutor(1, "guides")
        self._compiling: dict[str, tuple[Future[Grammar], SubmitRequest | ImportRequest | None]] = {}
        """Id of the message that waits for a grammar -> the grammar, and the request that begins with it, if any."""
        self._questions: dict[QueryKind, Callable[[], object]] = {
            "observe": lambda: StatsSnapshot(self._engine.stats(), self._engine.meter),
            "hits": self._hits,
            "prefixes": lambda: snapshot_index(self._engine.scheduler.cache.store.index),
            "reset": self._engine.reset_prefix_cache,
            "check": self._check,
            "publish": self._publish,
            "close": partial(self._engine.close, SAVE_PATIENCE),
        }

    def run(self) -> None:
        """Run until the server is gone (EOFError, OSError), or until the engine fails, and raise the error."""
        while True:
            if self._engine.has_unfinished:
                self._step()
            else:
                self._engine.check_ranks()
            for message in self._channel.receive(self._receive_timeout()):
                self._handle(message)
            self._handle_compiled()
            self._look_at_files()
            messages: list[EngineReply | RequestExported | OutputDeltas | CacheEvents] = [*self._replies]
            self._replies.clear()
            if deltas := self._due_deltas():
                messages.append(OutputDeltas([_sendable(delta) for delta in deltas]))
            if self._cache_events is not None and (events := self._due_events(self._cache_events)):
                messages.append(CacheEvents(events))
            if messages:
                self._channel.send(*messages)

    def _due_deltas(self) -> list[OutputDelta]:
        """Return the output deltas that are to be sent now."""
        are_all = self._pace.allows_all or not self._engine.has_unfinished
        if not self._deltas or not (are_all or (self._deltas.is_urgent and self._pace.allows_urgent)):
            return []
        self._pace.sent(are_all)
        return self._deltas.take(urgent_alone=not are_all)

    def _due_events(self, log: CacheEventLog) -> list[CacheEvent]:
        """Return the events of the prefix index that are to be sent now; they wait a little to share messages."""
        now = time.monotonic()
        if self._engine.has_unfinished and now < self._next_events:
            return []
        self._next_events = now + _EVENT_PERIOD
        return log.take()

    def _look_at_files(self) -> None:
        """Check the model's files about once a second: the server's queries bring the loop here often enough."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_AT_FILES
            self._engine.check_files()

    def _receive_timeout(self) -> float | None:
        if self._engine.has_unfinished or self._deltas:
            return 0
        if self._engine.online_checks is not None and self._engine.online_checks.advance():
            self._is_checking = True
            return 0
        if self._compiling:
            return _GLANCE
        return _LOOK_AT_RANKS if self._engine.has_ranks else None

    def _handle(self, message: object) -> None:
        match message:
            case SubmitRequest():
                if message.params.guide is None:
                    self._reply(message.request_id, partial(self._add, message))
                else:
                    compiled = self._compiler.submit(self._engine.compile_guide, message.params.guide)
                    self._compiling[message.request_id] = compiled, message
            case ImportRequest(request_id, _, guide):
                if guide is None:
                    self._reply(request_id, partial(self._import, message))
                else:
                    self._compiling[request_id] = self._compiler.submit(self._engine.compile_guide, guide), message
            case ExportRequest(call_id, request_id):
                self._export(call_id, request_id)
            case AbortRequest(request_id):
                if self._compiling.pop(request_id, None) is None:
                    self._engine.abort(request_id)
                    self._deltas.drop(request_id)
            case DeltasHandled(cost):
                self._pace.settled(cost)
            case CompileGuide(call_id, guide):
                self._compiling[call_id] = self._compiler.submit(self._engine.compile_guide, guide), None
            case Query(call_id, question):
                self._reply(call_id, self._questions[question])
            case _:
                raise TypeError(f"no such message: {message!r}")

    def _handle_compiled(self) -> None:
        for call_id, (compiled, request) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[call_id]
                self._reply(call_id, partial(self._use, compiled, request))

    def _use(self, compiled: Future[Grammar], request: SubmitRequest | ImportRequest | None) -> None:
        grammar = compiled.result()
        if isinstance(request, ImportRequest):
            self._import(request, grammar)
        elif request is not None:
            self._add(request, grammar)

    def _import(self, request: ImportRequest, grammar: Grammar | None = None) -> None:
        self._engine.import_request(request.exported, request_id=request.request_id, grammar=grammar)
        output = self._engine.output(request.request_id)
        assert output is not None
        self._deltas.resume(output)
        if request.final_only:
            self._deltas.hold_until_end(request.request_id)

    def _export(self, call_id: str, request_id: str) -> None:
        """Export a request. Its last output delta follows the answer, with those of the next step."""
        try:
            self._replies.append(RequestExported(call_id, request_id, self._engine.export_request(request_id)))
        except Exception as error:
            self._replies.append(EngineReply(call_id, error=picklable_error(error)))

    def _add(self, request: SubmitRequest, grammar: Grammar | None = None) -> None:
        self._engine.add_request(
            request.prompt_token_ids,
            request.params,
            request_id=request.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar=grammar,
            media=request.media,
            client=request.client,
            pooling=request.pooling,
            arrival=request.arrival,
            marks=request.marks,
        )
        if request.final_only:
            self._deltas.hold_until_end(request.request_id)

    def _reply(self, call_id: str, work: Callable[[], object]) -> None:
        try:
            reply = EngineReply(call_id, work())
        except Exception as error:
            reply = EngineReply(call_id, error=picklable_error(error))
        self._replies.append(reply)

    def _step(self) -> None:
        if self._is_checking and self._engine.online_checks is not None:
            self._engine.online_checks.pause()
            self._is_checking = False
        failed = self._engine.scheduler.counters.failed_steps
        outputs = self._engine.step()
        self._deltas.note(outputs)
        has_failed = self._engine.scheduler.counters.failed_steps > failed
        _log_errors(outputs, has_failed)
        if has_failed:
            # Its requests have failed. The others may continue only if the bookkeeping is still sound.
            self._engine.scheduler.check_integrity()

    def _hits(self) -> frozenset[int] | None:
        cache = self._engine.scheduler.cache
        keys = prefix_hit_keys(cache.store.index, self._engine.plan.memory.num_slots > 0)
        reported_keys, self._reported_keys = self._reported_keys, keys
        return None if keys == reported_keys else keys

    def _publish(self) -> None:
        self._cache_events = self._engine.scheduler.cache.store.index.publish()

    def _check(self) -> int:
        scheduler = self._engine.scheduler
        scheduler.check_integrity()
        return len(self._compiling) + self._deltas.num_kept + scheduler.num_waiting + scheduler.num_running


def _sendable(delta: OutputDelta) -> OutputDelta:
    """Return a delta in the form that is sent.

    It has no prompt and no prompt log-probabilities, which the server has, and its error is one that the server can
    read.
    """
    output = delta.output
    if output is None:
        return delta
    error = None if output.error is None else step_error(output.error)
    return delta._replace(output=replace(packed(output), prompt_token_ids=[], prompt_logprobs=None, error=error))


def _log_errors(outputs: Sequence[RequestOutput], has_step_failed: bool) -> None:
    errors = {output.request_id: output.error for output in outputs if output.error is not None and output.finished}
    if has_step_failed:
        cause = next(iter(errors.values()), None)
        log.error("a step failed, and %d requests with it", len(errors), exc_info=cause)
        return
    for request_id, error in errors.items():
        log.error("request %s failed: %s", request_id, error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Exit without waiting for threads that compile grammars.
    os._exit(1)
