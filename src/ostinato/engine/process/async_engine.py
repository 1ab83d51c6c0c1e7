"""AsyncEngine: an engine in a separate process, for many requests from one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from ostinato.config import EngineConfig
from ostinato.engine.input_processor import check_length
from ostinato.engine.migration.drain import DrainResult, drain
from ostinato.engine.migration.wire_format import params_of, unpack_snapshot
from ostinato.engine.process.cache_event_hub import CacheEventHub
from ostinato.engine.process.engine_messages import (
    CacheEvents,
    CompileGuide,
    EngineReply,
    EngineStart,
    EngineStarted,
    ExportRequest,
    ImportRequest,
    MakeEngine,
    OutputDeltas,
    Query,
    QueryKind,
    RequestExported,
    RequestFailed,
    StatsSnapshot,
    SubmitRequest,
)
from ostinato.engine.process.engine_process import EngineProcess, make_engine
from ostinato.engine.process.pending_calls import Heartbeat, PendingCalls, set_future
from ostinato.engine.process.queue_limit import QueueLimit
from ostinato.engine.process.request_streams import RequestStream, StreamRegistry
from ostinato.engine.text.chat_template import ChatTemplate
from ostinato.engine.text.tokenizer import Tokenizer, load_tokenizer_and_template
from ostinato.errors import EngineDraining, EngineFailed, EngineStopped
from ostinato.json_io import JsonObject
from ostinato.kv_cache.marks import Mark
from ostinato.kv_cache.offload.save_restore import SAVE_PATIENCE
from ostinato.media.media_input import MediaInput, load_media_input
from ostinato.media.media_prompt import MediaPrompt
from ostinato.observe.counts import ProgressFn, no_progress
from ostinato.observe.logs import set_log_levels
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.sampling.pooler import PoolingKind


class EngineTransport(Protocol):
    """Connection to the engine: a process on this machine, or several on others."""

    started: EngineStarted
    """First report of the engine."""
    on_message: Callable[[object], None]
    """Callback on the loop for the engine's messages."""
    on_end: Callable[[Exception], None]
    """Callback on the loop, called once, when nothing will be computed any more."""

    def send(self, message: object) -> None: ...

    async def end(self) -> None: ...


class AsyncEngine:
    """Serves requests of one event loop. Made by `start`; every method is called on the loop that it was started on.

    This side has the tokenizer, the chat template, the plan and the streams. The engine itself, with the model and the
    grammars, runs in another process (`EngineLoop`), which reads messages between two steps and sends the results.
    """

    def __init__(
        self,
        process: EngineTransport,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        media: MediaInput | None,
        max_waiting: int,
        max_per_client: int | None = None,
    ) -> None:
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.media = media
        """Image input of the model; None for a model of text alone."""
        self.plan, self.default_params = process.started.plan, process.started.default_params
        self.vocab_size = process.started.vocab_size
        """Vocabulary size of the model, which may be padded."""
        self.started = process.started
        """First report of the engine's process."""
        self.queue_limit = QueueLimit(self.plan.settings.max_num_seqs, max_waiting, max_per_client=max_per_client)
        self.failure: Exception | None = None
        """Error that ended the engine, if one did."""
        self.on_failure: Callable[[], None] = lambda: None
        """Callback on the loop, called when the engine has failed."""
        self.final_only = False
        """True if streams give everything at once, when their requests have ended.

        The output so far of a request that is ended early is not known then.
        """
        self._process = process
        self._streams = StreamRegistry(self.queue_limit, process.send)
        self.backlog = self._streams.backlog
        """Bytes of output that clients have not taken, and their bound."""
        self._calls = PendingCalls(process.send)
        self._stopping = self._draining = False
        self._heartbeat: Heartbeat | None = None
        self.cache_events: CacheEventHub | None = None
        """Events of the prefix index for readers; None before `publish_cache_events`."""
        process.on_message, process.on_end = self._handle_message, self.fail

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        max_waiting: int = 1024,
        max_per_client: Callable[[int], int | None] = lambda max_num_seqs: None,
        progress: ProgressFn = no_progress,
        make: MakeEngine = make_engine,
    ) -> AsyncEngine:
        """Load the model in a separate process and run one request of one token, so that a step has succeeded.

        `max_waiting` is the number of outputs that may wait besides those that run; more are Overloaded.
        `max_per_client` maps the largest number of running outputs to a bound on one client's unfinished outputs; None
        means no bound but that of all. `make` makes the engine: a function that the process can import. Raises the
        errors of `make` and of the first step; those that the caller cannot act on as EngineError.
        """
        set_log_levels()
        level = logging.getLogger("ostinato").getEffectiveLevel()
        if config.capture == "auto":
            # A capture at the start delays no answer.
            config = config.with_settings(capture="startup")
        process = await EngineProcess.start(EngineStart(config, make, level), progress)
        return await cls.connect(process, config, max_waiting, max_per_client)

    @classmethod
    async def connect(
        cls,
        process: EngineTransport,
        config: EngineConfig,
        max_waiting: int,
        max_per_client: Callable[[int], int | None],
    ) -> Self:
        """Return the server side of an engine that has started. If that fails, `process` is ended."""
        try:
            started = process.started
            texts = await asyncio.to_thread(load_tokenizer_and_template, started.plan.settings, started.directory)
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
        """Number of requests that have not ended."""
        return len(self._streams)

    def streams(self) -> list[RequestStream]:
        """Return the streams of all requests that have not ended."""
        return self._streams.all()

    def is_pending(self, stream: RequestStream) -> bool:
        """Return whether the engine has not added the stream's request yet."""
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
        arrival: float | None = None,
        marks: Sequence[Mark] = (),
    ) -> RequestStream:
        """Add a request (see `EngineCore.add_request`) and return its stream, to be used with `async with`.

        `media` comes with its own token ids as the prompt. `deadline` is the number of seconds from now after which the
        request is ended with DeadlineExceeded. `client` is the client that it belongs to. `arrival` is the moment (of
        `time.monotonic`) from which latencies count, if that is not now. Raises RequestError if it can never be served,
        Overloaded if too many wait, EngineFailed if the engine cannot continue. A cancelled call leaves nothing behind.
        A guide is compiled while other requests are computed.
        """
        self._check_open()
        params = params or self.default_params
        check_length(prompt, self.plan.settings.max_model_len, self.tokenizer.longest_token, pooling is None)
        stream = self._streams.open(params.n, client, deadline)
        with self._streams.submitting(stream, ends=True):
            if isinstance(prompt, str):
                # A thread encodes, since a long prompt takes long; the tokenizer is safe to share.
                prompt = await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens)
                stream.raise_error()  # it may have ended meanwhile, and then must not begin
                self._check_open()
            request_id, token_ids = stream.request_id, list(prompt)
            stream.prompt_token_ids = token_ids
            message = SubmitRequest(
                request_id,
                token_ids,
                params,
                priority,
                cache_salt,
                media,
                client,
                pooling,
                self.final_only,
                arrival,
                tuple(marks),
            )
            await self._send_and_wait(stream, message)
        return stream

    async def _import(self, exported: bytes, existing: RequestStream | None) -> RequestStream:
        # A thread unpacks, since the checksum covers all bytes.
        snapshot, _ = await asyncio.to_thread(unpack_snapshot, exported)
        params = params_of(snapshot)
        if existing is not None and existing.ended:
            return existing  # its reader left during the migration
        self._check()
        if existing is None:
            stream = self._streams.open(params.n, snapshot.client, None)
            stream.restore(snapshot)
        else:
            stream = existing
            self._streams.reattach(stream)
        with self._streams.submitting(stream, ends=existing is None):
            await self._send_and_wait(stream, ImportRequest(stream.request_id, exported, params.guide, self.final_only))
        return stream

    async def _send_and_wait(self, stream: RequestStream, message: SubmitRequest | ImportRequest) -> None:
        """Send a request and wait until the engine has added it; raise the error if it does not."""
        answered = self._calls.send(stream.request_id, message)
        stream.on_error = lambda error: set_future(answered, None, error)  # it may end while a long step runs
        await answered
        if self.failure is not None:  # the engine failed between its answer and this line, and nothing will come
            raise _failed(self.failure)

    async def export(self, request_id: str) -> bytes | None:
        """End a request here and return its export, from which another engine of the same plan continues it.

        None if it has ended by itself, or there is none of this id. The outputs of its stream end with `moved`, after
        all their deltas from here, and the stream has the bytes as `exported`. They hold the prompt.
        """
        self._check()
        call_id = self._calls.new_call_id("export")
        exported: bytes | None = await self._calls.send(call_id, ExportRequest(call_id, request_id))
        return exported

    async def import_(self, exported: bytes, *, stream: RequestStream | None = None) -> RequestStream:
        """Import a request that another engine of the same plan has exported.

        Its stream begins where the other one ended.

        With `stream`, that stream continues with the output deltas of this engine, and its reader notices nothing.
        Raises DamagedExport or ForeignExport, Overloaded, or RequestError if it can never be served here. `exported`
        may then be given to another engine, or back to the one that it came from.
        """
        self._check_open()
        return await self._import(exported, stream)

    async def drain(self, to: AsyncEngine | None = None) -> DrainResult:
        """Refuse new requests and migrate all present ones.

        They go to another engine on this loop, whose output deltas their streams then receive; or, without one, to
        wherever the readers of their streams bring `RequestStream.exported`. A request that the other engine refuses is
        kept and computed to its end here. Returns when each request has ended, was moved or is kept; `resume` accepts
        requests again.
        """
        self._draining = True
        return await drain(self, to)

    async def take_back(self, exported: bytes, stream: RequestStream) -> None:
        """Import a request again that another engine has refused, though this one is being drained."""
        self._check()
        await self._import(exported, stream)

    def resume(self) -> None:
        """Accept requests again."""
        self._draining = False

    async def compile_guide(self, guide: Guide) -> None:
        """Compile a guide beside other requests, so that those with it begin at once. RequestError if that fails."""
        self._check()
        call_id = self._calls.new_call_id("compile")
        await self._calls.send(call_id, CompileGuide(call_id, guide))

    async def watch(self, timeout: float, on_change: Callable[[bool], None]) -> None:
        """Watch from now on whether the engine answers within `timeout` seconds.

        `on_change` is called with True when it stalls, and with False when it answers again. Returns once it has
        answered, so that its counts are known from then on.
        """
        first = await self.observe()
        self._heartbeat = Heartbeat(self.observe, timeout, on_change)
        self._heartbeat.record(first)

    @property
    def is_stalled(self) -> bool:
        """True if the engine is watched and has not answered in time."""
        return self._heartbeat is not None and self._heartbeat.is_stalled

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine last answered; 0 if it is not watched."""
        return 0.0 if self._heartbeat is None else self._heartbeat.age

    @property
    def last_stats(self) -> JsonObject:
        """Counts of the engine's last answer; empty if it is not watched."""
        last = None if self._heartbeat is None else self._heartbeat.last
        return {} if last is None else last.stats

    async def observe(self) -> StatsSnapshot:
        """Return the engine's counts between two steps."""
        counts: StatsSnapshot = await self._ask("observe")
        return counts

    async def latest_observation(self) -> StatsSnapshot:
        """Return the engine's counts, or the last known ones if it does not answer within a second."""
        return await (self.observe() if self._heartbeat is None else self._heartbeat.poll(1.0))

    async def all_observations(self) -> dict[str, StatsSnapshot]:
        """Return the counts of `latest_observation` for each engine behind this one, by name."""
        return {"0": await self.latest_observation()}

    async def prefixes(self) -> JsonObject:
        """Return a picture of the prefix index between two steps; see `kv_cache.index_snapshot.snapshot_index`."""
        snapshot: JsonObject = await self._ask("prefixes")
        return snapshot

    async def publish_cache_events(self, with_tokens: bool) -> CacheEventHub:
        """Have the engine tell all changes of its prefix index from now on, to the readers of `cache_events`.

        With tokens, what readers get is text of all clients.
        """
        self.cache_events = CacheEventHub(with_tokens)
        await self._ask("publish")
        return self.cache_events

    async def reset_prefix_cache(self) -> bool:
        """Drop every prefix that no running request uses; return False if some are in use."""
        return bool(await self._ask("reset"))

    async def check_integrity(self) -> int:
        """Check the engine's bookkeeping between two steps; return for how many requests it keeps anything.

        EngineError with what is wrong.
        """
        num_kept: int = await self._ask("check")
        return num_kept

    async def _ask(self, question: QueryKind) -> Any:
        self._check()
        return await self._calls.ask(question)

    async def stop(self) -> None:
        """End every unfinished request, with EngineStopped, and the process."""
        self._stopping = True
        self.end_cache_events()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for request_id in list(self._streams):
            self._streams.finish(request_id, EngineStopped("the engine was stopped before the request had ended"))
        has_files = self.plan.cache_files is not None or self.plan.settings.record is not None
        if has_files and self.failure is None:
            with contextlib.suppress(Exception):  # the engine ends in any case
                await asyncio.wait_for(self._calls.send("close", Query("close", "close")), SAVE_PATIENCE + 5)
        self._calls.fail_all(EngineStopped("the engine was stopped"))
        await self._process.end()

    def end_cache_events(self) -> None:
        """End the streams of cache events. Readers then ask whether the server still takes requests."""
        if self.cache_events is not None:
            self.cache_events.end()

    def _check(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._stopping:
            raise EngineStopped("the engine was stopped")

    def _check_open(self) -> None:
        self._check()
        if self._draining:
            raise EngineDraining("the engine moves its requests away, and takes none in")

    def _handle_message(self, message: object) -> None:
        """Handle a message of the engine."""
        match message:
            case OutputDeltas(deltas):
                self._streams.deliver(deltas)
            case RequestExported(call_id, request_id, exported):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.exported = exported or stream.exported
                self._calls.resolve(call_id, exported, None)
            case EngineReply(call_id, result, error):
                self._calls.resolve(call_id, result, error)
            case CacheEvents(events):
                if self.cache_events is not None:
                    self.cache_events.publish(events)
            case RequestFailed(request_id, error):
                if request_id in self._streams:
                    self._streams.finish(request_id, error)
            case _:
                raise TypeError(f"no such message: {message!r}")

    def fail(self, error: Exception) -> None:
        """End all requests and calls with an error: nothing will be computed any more."""
        if self.failure is not None:
            return
        self.failure = error
        self.end_cache_events()
        for stream in self.streams():
            if not self.is_pending(stream):  # entering streams get the error from their call
                self._streams.finish(stream.request_id, _failed(error))
        self._calls.fail_all(_failed(error))
        self.on_failure()


def _failed(cause: Exception) -> EngineFailed:
    error = EngineFailed("the engine has failed and serves no more requests")
    error.__cause__ = cause
    return error
