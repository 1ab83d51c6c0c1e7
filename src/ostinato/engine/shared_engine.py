"""One engine shared by several threads: one thread runs the steps for all, and the others wait for their outputs."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.engine.core import EngineCore
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ForkError, RequestError


class FairLock:
    """Lock that threads get in the order in which they asked for it. Python's own may starve a thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_held = False

    def try_acquire(self) -> bool:
        """Take the lock if it is free, and return whether it was. Never waits."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._is_held:
                return False
            self._is_held = True
            return True
        finally:
            self._guard.release()

    def acquire(self) -> None:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until `release` hands the lock over
        except BaseException:
            with self._guard:
                was_given = turn not in self._waiting
                if not was_given:
                    self._waiting.remove(turn)
            if was_given:
                self.release()
            raise

    def release(self) -> None:
        """Hand the lock to the thread that has waited longest, if one waits."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False


class BlockingCall:
    """Requests that one call on one thread has added and waits for."""

    def __init__(self, monitor: threading.Lock, *, wants_text: bool) -> None:
        """Create a call without requests. With `wants_text`, all new text of its request is news, not only its end."""
        self.requests: dict[str, RequestOutput] = {}
        """Unfinished requests by id."""
        self.finished: dict[str, RequestOutput] = {}
        self.text = ""
        """Text of its one request, up to the last step."""
        self.is_ready = False
        self.was_closed = False
        """True if the engine was closed while the call waited."""
        self.condition = threading.Condition(monitor)
        self._wants_text = wants_text

    def update(self, output: RequestOutput) -> None:
        """Note that a step has changed one of the call's outputs."""
        if self._wants_text and len(output.outputs[0].text) > len(self.text):
            self.text = output.outputs[0].text
            self.is_ready = True
        if output.finished and self.requests.pop(output.request_id, None) is not None:
            self.finished[output.request_id] = output
            self.is_ready = True


class SharedEngine:
    """Shares an engine, which can serve one thread at a time, between threads.

    What changes the engine is done `between_steps`. A thread that waits for its requests runs steps if no other one
    does. Each step serves the requests of all threads, and its output deltas go to the calls that wait for them. So the
    steps run on one thread as long as its call lasts, and a step with requests of ten threads costs no more than one
    with ten requests of one.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine: EngineCore | None = engine
        self._pid = os.getpid()
        self._access = FairLock()
        """Lock held while the engine is used, in a step or between two."""
        self._monitor = threading.Lock()
        """Lock held while calls are looked at, never for long."""
        self._stepping_call: BlockingCall | None = None
        """The call whose thread runs the steps."""
        self._waiting: list[BlockingCall] = []
        """Calls that wait for a thread to step."""
        self._calls: dict[str, BlockingCall] = {}
        """Calls by request id."""
        self._abandoned: deque[str] = deque()
        """Ids of abandoned requests, to be aborted."""

    @property
    def engine(self) -> EngineCore:
        """The engine. RequestError once it is closed; ForkError in a fork of the process that made it."""
        self._check_process()
        if self._engine is None:
            raise RequestError("this LLM was closed; make another one")
        return self._engine

    @contextmanager
    def between_steps(self) -> Iterator[EngineCore]:
        """Yield the engine, which runs no step meanwhile. Threads get it in the order in which they asked."""
        self._check_process()
        self._access.acquire()
        try:
            engine = self.engine
            self._abort_abandoned(engine)
            yield engine
        finally:
            self._access.release()

    def track(self, call: BlockingCall, request_id: str, output: RequestOutput) -> None:
        """Make a request's output the call's from now on. Call it within the `between_steps` that added the request."""
        with self._monitor:
            call.requests[request_id] = output
            self._calls[request_id] = call

    def new_call(self, *, wants_text: bool = False) -> BlockingCall:
        return BlockingCall(self._monitor, wants_text=wants_text)

    def wait_for_update(self, call: BlockingCall) -> None:
        """Wait until the call has news: run steps until then, or wait for another thread that does.

        Raises what interrupts a step that it runs (a KeyboardInterrupt); errors that end requests are in their outputs.
        """
        self._check_process()
        while True:
            with self._monitor:
                while not call.is_ready and self._stepping_call is not None:
                    self._waiting.append(call)
                    try:
                        call.condition.wait()
                    finally:
                        self._waiting.remove(call)
                if call.is_ready:
                    call.is_ready = False
                    self._wake_next()
                    break
                self._stepping_call = call
            try:
                while not call.is_ready:
                    self._step(call)
            finally:
                with self._monitor:
                    self._stepping_call = None
                    self._wake_next()
        if call.was_closed:
            raise RequestError("the LLM was closed before the request had ended")

    def abandon(self, call: BlockingCall) -> None:
        """Abort what is left of a call: at once, or before the next step if the engine is in use.

        Never waits, since the garbage collector may call it anywhere, also inside a step.
        """
        if os.getpid() != self._pid:
            return
        self._abandoned.extend(list(call.requests))
        while self._abandoned and self._access.try_acquire():
            try:
                if self._engine is not None:
                    self._abort_abandoned(self._engine)
                else:
                    self._abandoned.clear()
            finally:
                self._access.release()

    def close(self) -> EngineCore | None:
        """Remove and return the engine, so that calls raise RequestError, waiting ones too. None if it was closed."""
        self._check_process()
        self._access.acquire()
        try:
            engine, self._engine = self._engine, None
            if engine is None:
                return None
            with self._monitor:
                for request_id, call in list(self._calls.items()):
                    engine.abort(request_id)
                    call.is_ready = call.was_closed = True
                    call.condition.notify()
                self._calls.clear()
            return engine
        finally:
            self._access.release()

    def _step(self, call: BlockingCall) -> None:
        """Run one step and hand out its outputs."""
        self._access.acquire()
        try:
            engine = self.engine
            self._abort_abandoned(engine)
            try:
                changed = engine.step()
            except BaseException:
                # The step returned no outputs, but may have ended some, of any call.
                with self._monitor:
                    calls = set(self._calls.values())
                    self._deliver([output for other in calls for output in other.requests.values()])
                raise
            # If the engine has nothing left to do, other code may have aborted the call's requests.
            unfinished = [] if engine.has_unfinished else list(call.requests.values())
            with self._monitor:
                self._deliver([*changed, *unfinished])
        finally:
            self._access.release()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            call.update(output)
            if output.finished:
                del self._calls[output.request_id]
            if call.is_ready and call is not self._stepping_call:
                call.condition.notify()

    def _wake_next(self) -> None:
        """Wake a waiting thread to run the steps if no thread does."""
        if self._stepping_call is None and self._waiting:
            self._waiting[0].condition.notify()

    def _abort_abandoned(self, engine: EngineCore) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            engine.abort(request_id)
            self._calls.pop(request_id, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"this LLM was made in process {self._pid}, and process {os.getpid()} is a fork of it")
