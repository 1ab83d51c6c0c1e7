"""AsyncEngine: an engine in a process of its own, for many requests from one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from ostinato.config import EngineConfig
from ostinato.engine.checks import check_length
from ostinato.engine.move.form import params_of, unpack
from ostinato.engine.process.admission import Admission
from ostinato.engine.process.calls import Calls, resolve
from ostinato.engine.process.draining import Drained, drain
from ostinato.engine.process.failures import EngineDraining, EngineFailed, EngineStopped
from ostinato.engine.process.heartbeat import Heartbeat
from ostinato.engine.process.launch import EngineProcess, make_engine
from ostinato.engine.process.messages import (
    Ask,
    Compile,
    Ended,
    Export,
    Exported,
    Gained,
    Import,
    Observation,
    Question,
    Reply,
    Start,
    Started,
    Submit,
)
from ostinato.engine.process.stream import Stream
from ostinato.engine.process.streams import Streams
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.texts import load_texts
from ostinato.engine.text.tokenizer import Tokenizer
from ostinato.media.input import MediaInput, load_media_input
from ostinato.media.prompt import MediaPrompt
from ostinato.models.pooling import PoolingKind
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.run.runner import StartProgress

SAVE_PATIENCE = 60.0
"""Seconds that an engine has at its end to write what its prefix cache has."""


class EngineSide(Protocol):
    """Where messages to the engine go and come from: a process of its own, or several on other machines."""

    started: Started
    """What the engine has reported of itself."""
    on_message: Callable[[Any], None]
    """Called on the loop with what the engine says."""
    on_end: Callable[[Exception], None]
    """Called on the loop, once, when nothing will be computed any more."""

    def send(self, message: Any) -> None: ...

    async def end(self) -> None: ...


class AsyncEngine:
    """Serves requests of one event loop. Made by `start`; every method is called on the loop that it was started on.

    This side has the tokenizer, the chat template, the plan and the streams. The engine itself, with the model and the
    grammars, runs in another process (`EngineLoop`), which takes messages between two steps and sends what they give.
    """

    def __init__(
        self,
        process: EngineSide,
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
        self.whole = False
        """Whether streams give everything at once, when their requests have ended: what one has gained that is ended
        before is not known then."""
        self._process = process
        self._streams = Streams(self.admission, process.send)
        self._calls = Calls(process.send)
        self._stopping = self._draining = False
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
        return await cls.beside(process, config, max_waiting, max_per_client)

    @classmethod
    async def beside(
        cls,
        process: EngineSide,
        config: EngineConfig,
        max_waiting: int,
        max_per_client: Callable[[int], int | None],
    ) -> Self:
        """This side of an engine that has started. `process` is ended if that fails."""
        try:
            started = process.started
            texts = await asyncio.to_thread(load_texts, started.plan.settings, started.directory)
            tokenizer, chat_template = texts
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

    def streams(self) -> list[Stream]:
        """Of all requests that have not ended."""
        return self._streams.all()

    def is_entering(self, stream: Stream) -> bool:
        """Whether the engine has not taken its request in yet."""
        return self._streams.is_entering(stream.request_id)

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
        pooling: PoolingKind | None = None,
    ) -> Stream:
        """Takes in a request (see `Engine.add`); returns its stream, to be used with `async with`. `media` comes with
        its own token ids as the prompt.

        `deadline`: seconds from now after which the request is ended with DeadlineExceeded. `client`: whose it is.
        Raises RequestError if it can never be served, Overloaded if too many wait, EngineFailed if the engine cannot go
        on. Cancelled, it leaves nothing behind. A guide is compiled while others are computed.
        """
        self._check_open()
        params = params or self.default_params
        check_length(prompt, self.plan.settings.max_model_len, self.tokenizer.longest_token)
        stream = self._streams.open(params.n, client, deadline)
        with self._streams.entering(stream, ends=True):
            if isinstance(prompt, str):
                # Away from the loop, as a long prompt takes long; the tokenizer is safe to share.
                prompt = await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)
                stream.raise_error()  # it may have ended meanwhile, and then must not begin
                self._check_open()
            name, token_ids = stream.request_id, list(prompt)
            stream.prompt_token_ids = token_ids
            asked = Submit(name, token_ids, params, priority, cache_salt, media, client, pooling, self.whole)
            await self._handed_in(stream, asked)
        return stream

    async def _import(self, exported: bytes, given: Stream | None) -> Stream:
        # Away from the loop, as its checksum is of all its bytes.
        moved, _ = await asyncio.to_thread(unpack, exported)
        params = params_of(moved)
        if given is not None and given.ended:
            return given  # its reader left while it was on its way
        self._check()
        if given is None:
            stream = self._streams.open(params.n, moved.client, None)
            stream.go_on_from(moved)
        else:
            stream = given
            self._streams.go_on(stream)
        with self._streams.entering(stream, ends=given is None):
            await self._handed_in(stream, Import(stream.request_id, exported, params.guide, self.whole))
        return stream

    async def _handed_in(self, stream: Stream, message: Submit | Import) -> None:
        """Returns once the engine has taken a request in; raises why it does not."""
        answered = self._calls.send(stream.request_id, message)
        stream.on_error = lambda error: resolve(answered, None, error)  # it may end while a long step runs
        await answered

    async def export(self, request_id: str) -> bytes | None:
        """Ends a request here, and returns what another engine of the same plan needs to go on with it; None if it has
        ended by itself, or there is none of this id.

        The outputs of its stream end with `moved`, after all that they have gained here, and the stream has the bytes
        as `exported`. They hold the prompt.
        """
        self._check()
        name = self._calls.new_name("export")
        exported: bytes | None = await self._calls.send(name, Export(name, request_id))
        return exported

    async def import_(self, exported: bytes, *, stream: Stream | None = None) -> Stream:
        """Goes on with a request that another engine of the same plan has exported. Its stream begins where the one
        of that engine has ended.

        `stream`: one whose reader is to notice nothing; it goes on, with the gains of this engine. Raises DamagedExport
        or ForeignExport, Overloaded, or RequestError if it can never be served here. `exported` may then be given to
        another engine, or back to the one that it came from.
        """
        self._check_open()
        return await self._import(exported, stream)

    async def drain(self, to: AsyncEngine | None = None) -> Drained:
        """Takes in no more requests, and moves all that it has: to another engine on this loop, whose gains their
        streams then go on with; or, without one, to wherever the readers of their streams take `Stream.exported`.

        What the other engine refuses is kept, and computed to its end here. Returns when each request has ended, was
        moved or is kept; `resume` takes requests in again.
        """
        self._draining = True
        return await drain(self, to)

    async def take_back(self, exported: bytes, stream: Stream) -> None:
        """Goes on with a request that another engine has refused, though this one is being drained."""
        self._check()
        await self._import(exported, stream)

    def resume(self) -> None:
        """Takes in requests again."""
        self._draining = False

    async def compile_guide(self, guide: Guide) -> None:
        """Compiles a guide, while others are computed; requests that have it then begin at once. RequestError if that
        cannot be done."""
        self._check()
        name = self._calls.new_name("compile")
        await self._calls.send(name, Compile(name, guide))

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
        return await (self.observe() if self._heartbeat is None else self._heartbeat.look(patience))

    async def all_seen(self) -> dict[str, Observation]:
        """The counts of each engine behind this one, by its name, as `last_seen` has them."""
        return {"0": await self.last_seen()}

    async def prefixes(self) -> dict[str, Any]:
        """A picture of the prefix index between two steps; see `cache.picture.picture`."""
        return await self._ask("prefixes")

    async def check_integrity(self) -> int:
        """Checks the engine's bookkeeping between two steps; returns for how many requests it keeps anything.
        EngineError with what is wrong."""
        return await self._ask("check")

    async def _ask(self, question: Question) -> Any:
        self._check()
        return await self._calls.ask(question)

    async def stop(self) -> None:
        """Ends every request that is unfinished, with EngineStopped, and the process."""
        self._stopping = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for name in list(self._streams):
            self._streams.finish(name, EngineStopped("the engine was stopped before the request had ended"))
        if self.plan.cache_files is not None and self.failure is None:
            with contextlib.suppress(Exception):  # it ends in any case
                await asyncio.wait_for(self._calls.send("close", Ask("close", "close")), SAVE_PATIENCE)
        self._calls.refuse_all(EngineStopped("the engine was stopped"))
        await self._process.end()

    def _check(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._stopping:
            raise EngineStopped("the engine was stopped")

    def _check_open(self) -> None:
        self._check()
        if self._draining:
            raise EngineDraining("the engine moves its requests away, and takes none in")

    def _take(self, message: Any) -> None:
        """What the engine says."""
        match message:
            case Gained(deltas):
                self._streams.deliver(deltas)
            case Exported(call_id, request_id, exported):
                if (own := self._streams.get(request_id)) is not None:
                    own.exported = exported or own.exported
                self._calls.answer(call_id, exported, None)
            case Reply(call_id, result, error):
                self._calls.answer(call_id, result, error)
            case Ended(request_id, error):
                if request_id in self._streams:
                    self._streams.finish(request_id, error)
            case _:
                raise TypeError(f"no such message: {message!r}")

    def _fail(self, error: Exception) -> None:
        """Nothing will be computed any more."""
        self.failure = error
        for stream in self.streams():
            if not self.is_entering(stream):  # of those, whoever hands them in is told
                self._streams.finish(stream.request_id, _failed(error))
        self._calls.refuse_all(_failed(error))
        self.on_failure()


def _failed(cause: Exception) -> EngineFailed:
    error = EngineFailed("the engine has failed and serves no more requests")
    error.__cause__ = cause
    return error
