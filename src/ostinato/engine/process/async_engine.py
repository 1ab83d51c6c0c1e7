"""AsyncEngine: an engine in a process of its own, for many requests from one asyncio event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ostinato.config import EngineConfig
from ostinato.engine.process.admission import Admission
from ostinato.engine.process.delivery import OutputDelta
from ostinato.engine.process.failures import EngineFailed, EngineStopped
from ostinato.engine.process.heartbeat import Heartbeat
from ostinato.engine.process.launch import EngineProcess, make_engine
from ostinato.engine.process.messages import (
    Abort,
    Ask,
    Compile,
    Gained,
    Observation,
    Question,
    Reply,
    Settled,
    Start,
    Submit,
)
from ostinato.engine.process.stream import DeadlineExceeded, Stream
from ostinato.engine.text.chat_template import ChatTemplate, load_chat_template
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer
from ostinato.errors import RequestError
from ostinato.media.input import MediaInput, load_media_input
from ostinato.media.prompt import MediaPrompt
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.run.runner import StartProgress

_TURNS = 3
"""Turns of the event loop until a gain has left the server: its reader is woken, forwards it, sends it."""


class AsyncEngine:
    """Serves requests of one event loop. Made by `start`; every method is called on the loop that it was started on.

    This side has the tokenizer, the chat template, the plan and the streams. The engine itself, with the model and the
    grammars, runs in another process (`EngineLoop`), which takes messages between two steps and sends what they give.
    """

    def __init__(
        self,
        process: EngineProcess,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        media: MediaInput | None,
        max_waiting: int,
        max_per_client: int | None = None,
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.media = media
        """How the model takes in images; None for one of text alone."""
        self.plan, self.default_params = process.started.plan, process.started.default_params
        self.vocab_size = process.started.vocab_size
        """The model's, which may be padded."""
        self.started = process.started
        """What the engine's process has reported of itself."""
        self.admission = Admission(self.plan.settings.max_num_seqs, max_waiting, max_per_client=max_per_client)
        self.failure: Exception | None = None
        """What ended the engine, if something has."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called on the loop when the engine has failed."""
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        """Messages that the engine has not answered yet."""
        self._num_ids = self._num_questions = 0
        self._stopping = False
        self._heartbeat: Heartbeat | None = None
        process.on_message, process.on_end = self._take, self._fail

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_waiting: int = 1024,
        max_per_client: Callable[[int], int | None] = lambda max_num_seqs: None,
        progress: StartProgress = lambda what, done, total: None,
        make: Callable[[EngineConfig, StartProgress], Engine] = make_engine,
    ) -> AsyncEngine:
        """Loads the model in a process of its own and runs one request of one token, so that a step has succeeded.

        `max_waiting`: outputs that may wait besides those that run; more are Overloaded. `max_per_client`: outputs of
        one client that may be unfinished, by how many may run; None: as many as of all. `make` makes the engine: a
        function that the process can import. Raises what that raises and the error of the first step, as EngineError
        what is nobody's to act on.
        """
        level = logging.getLogger("ostinato").getEffectiveLevel()
        if config.capture == "auto":
            # Nobody waits for the start as for an answer, in which a capture would show.
            config = config.with_settings(capture="startup")
        process = await EngineProcess.start(Start(config, make, level), progress)
        try:
            started = process.started
            tokenizer = await asyncio.to_thread(load_tokenizer, started.directory)
            chat_template = load_chat_template(started.directory, tokenizer.special_tokens)
            remote = config.allow_remote_images
            media = load_media_input(started.directory, started.vision, tokenizer, started.plan, remote)
            share = max_per_client(started.plan.settings.max_num_seqs)
            return cls(process, tokenizer, chat_template, media, max_waiting, share)
        except BaseException:
            await asyncio.shield(process.end())
            raise

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        media: MediaPrompt | None = None,
        deadline: float | None = None,
        client: str | None = None,
    ) -> Stream:
        """Takes in a request (see `Engine.add`); returns its stream, to be used with `async with`. `media` comes with
        its own token ids as the prompt.

        `deadline`: seconds from now after which the request is ended with DeadlineExceeded. `client`: whose it is.
        Raises RequestError if it
        can never be served, Overloaded if too many wait, EngineFailed if the engine cannot go on. Cancelled, it leaves
        nothing behind. A guide is compiled while others are computed.
        """
        self._check()
        params = params or self.default_params
        self._check_length(prompt)
        self.admission.enter(params.n, client)
        name = self._new_id()
        stream = self._streams[name] = Stream(name, params.n, lambda: self._end(name), client)
        if deadline is not None:
            stream.timer = self._loop.call_later(deadline, self._expire, name, deadline)
        try:
            if isinstance(prompt, str):
                # Away from the loop, as a long prompt takes long; the tokenizer is safe to share.
                prompt = await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)
                stream.raise_error()  # it may have ended meanwhile, and then must not begin
                self._check()
            stream.prompt_token_ids = list(prompt)
            adding = self._call(
                name, Submit(name, stream.prompt_token_ids, params, priority, cache_salt, media, client)
            )
            stream.on_error = lambda error: _set(adding, None, error)  # it may end while a long step runs
            await adding
        except BaseException as error:
            if self._streams.pop(name, None) is not None:  # else it ended meanwhile, and was counted out
                self.admission.give_back(params.n, client)
                stream.end()
            if not isinstance(error, Exception):
                self._abandon(name)  # cancelled: it may have been added, or soon be
            raise
        return stream

    async def compile_guide(self, guide: Guide) -> None:
        """Compiles a guide, while others are computed; requests that have it then begin at once. RequestError if that
        cannot be done."""
        self._check()
        name = self._new_id()
        await self._call(name, Compile(name, guide))

    async def watch(self, timeout: float, on_change: Callable[[bool], None]) -> None:
        """Watches from now on whether the engine answers within `timeout` seconds. `on_change` is told when it stalls
        (True), and when it goes on. Returns once it has answered, so that its counts are known from then on."""
        first = await self.observe()
        self._heartbeat = Heartbeat(self.observe, timeout, on_change)
        self._heartbeat.note(first)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine, which is watched, has not answered in time."""
        return self._heartbeat is not None and self._heartbeat.is_stalled

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine, which is watched, last answered."""
        return 0.0 if self._heartbeat is None else self._heartbeat.age

    async def observe(self) -> Observation:
        """The engine's counts between two steps."""
        return await self._ask("observe")

    async def last_seen(self, patience: float = 1.0) -> Observation:
        """The engine's counts; if it does not give them within `patience` seconds, those that it gave last."""
        last = None if self._heartbeat is None else self._heartbeat.last
        if last is None:
            return await self.observe()
        if self.is_stalled:
            return last
        asked = asyncio.ensure_future(self.observe())
        done, _ = await asyncio.wait([asked], timeout=patience)
        if not done:
            asked.cancel()
            return last
        return await asked

    async def check_integrity(self) -> int:
        """Checks the engine's bookkeeping between two steps; returns for how many requests it keeps anything.
        EngineError with what is wrong."""
        return await self._ask("check")

    async def _ask(self, question: Question) -> Any:
        self._check()
        self._num_questions += 1
        name = f"question-{self._num_questions}"  # not counted with requests, which the heartbeat would renumber
        return await self._call(name, Ask(name, question))

    def _call(self, name: str, message: Submit | Compile | Ask) -> asyncio.Future[Any]:
        future = self._calls[name] = self._loop.create_future()
        future.add_done_callback(lambda _: self._calls.pop(name, None))
        self._process.send(message)
        return future

    async def stop(self) -> None:
        """Ends every request that is unfinished, with EngineStopped, and the process."""
        self._stopping = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for name in list(self._streams):
            self._finish(name, EngineStopped("the engine was stopped before the request had ended"))
        self._refuse_calls(EngineStopped("the engine was stopped"))
        await self._process.end()

    def _check(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._stopping:
            raise EngineStopped("the engine was stopped")

    def _check_length(self, prompt: str | Sequence[int]) -> None:
        """Refuses at once what is too long in any case, since to find out by tokenizing it may take seconds."""
        max_model_len = self.plan.settings.max_model_len
        most = max_model_len * self.tokenizer.longest_token if isinstance(prompt, str) else max_model_len
        if len(prompt) > most:
            unit = "characters" if isinstance(prompt, str) else "tokens"
            raise RequestError(
                f"the prompt has {len(prompt)} {unit}, and max_model_len ({max_model_len}) has room for at most {most}"
            )

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"async-{self._num_ids}"

    def _end(self, request_id: str, error: Exception | None = None) -> None:
        """Ends a request before its time; it may have ended already."""
        if request_id in self._streams:
            self._finish(request_id, error)
            self._abandon(request_id)

    def _finish(self, request_id: str, error: Exception | None = None) -> None:
        """A request has ended."""
        stream = self._streams.pop(request_id)
        stream.end(error)
        self.admission.leave(stream.num_outputs, stream.client)

    def _abandon(self, request_id: str) -> None:
        """Has the engine drop a request that nobody waits for."""
        self._process.send(Abort(request_id))

    def _expire(self, request_id: str, deadline: float) -> None:
        self._end(request_id, DeadlineExceeded(f"the request did not end within its deadline of {deadline:g} seconds"))

    def _take(self, message: Any) -> None:
        """What the engine says."""
        match message:
            case Gained(deltas):
                self._deliver(deltas)
            case Reply(call_id, result, error):
                if (future := self._calls.get(call_id)) is not None:  # else nobody waits for it any more
                    _set(future, result, error)
            case _:
                raise TypeError(f"no such message: {message!r}")

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """Hands each stream what its request has gained."""
        begin = time.thread_time()
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)
                if delta.output is not None:
                    self._finish(delta.request_id, delta.output.error)
        self._settle(begin, _TURNS)

    def _settle(self, begin: float, turns: int) -> None:
        """Measures what gains cost the loop until those who wait for them have had their turn."""
        if turns:
            self._loop.call_soon(self._settle, begin, turns - 1)
        else:
            self._process.send(Settled(time.thread_time() - begin))

    def _fail(self, error: Exception) -> None:
        """Nothing will be computed any more."""
        self.failure = error
        for name in list(self._streams):
            self._finish(name, _failed(error))
        self._refuse_calls(_failed(error))
        self.on_failure()

    def _refuse_calls(self, error: Exception) -> None:
        for future in list(self._calls.values()):
            _set(future, None, error)


def _failed(cause: Exception) -> EngineFailed:
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
