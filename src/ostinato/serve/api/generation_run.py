"""Common parts of all endpoints' answers: the request in the engine, its tokens, its JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from json.encoder import encode_basestring
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from ostinato.engine.cache_files import checkpoint_digest
from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.output_deltas import OutputDelta
from ostinato.engine.process.request_streams import RequestStream
from ostinato.json_io import JsonMapping, JsonObject
from ostinato.kv_cache.marks import Mark
from ostinato.media.media_prompt import MediaPrompt
from ostinato.observe.request_record import RequestRecord
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.limits import check_prompt_length
from ostinato.serve.api.generation_fields import GenerationBody
from ostinato.serve.body_workers.context import GuideTrial, RequestContext
from ostinato.serve.body_workers.pool import BodyWorkerPool
from ostinato.serve.chat.answer_formats import AnswerFormats, AnswerLayout
from ostinato.serve.chat.cache_marks import locate_marks
from ostinato.serve.chat.chat_output import ChatOutput
from ostinato.serve.chat.conversation import Conversation, render, starts_in_reasoning, token_ids_of
from ostinato.serve.chat.guides import GuideCompiler, GuidePlan, GuideRequest, answer_guide
from ostinato.serve.chat.text_support import ModelText
from ostinato.serve.chat.tools import Tool
from ostinato.serve.http.api_errors import field_error
from ostinato.serve.http.streaming import PIECE, ChunkedJson, LastEvents, LoopSlices, cancel_on_disconnect
from ostinato.serve.settings import ServeSettings

T = TypeVar("T")
quoted = encode_basestring
"""Function that returns a text as a JSON string."""


@dataclass(frozen=True)
class ServedModel:
    """An engine and the context of its requests, made once and used on the event loop."""

    engine: AsyncEngine
    text: ModelText
    compiler: GuideCompiler
    context: RequestContext
    """Context of requests that are prepared on the event loop."""
    digest: str
    """64 hex digits that identify the checkpoint as it was when the server started."""
    slices: LoopSlices = field(default_factory=LoopSlices)
    """Slices of the event loop's time for making long answers."""


def model_of(
    engine: AsyncEngine, settings: ServeSettings, model_name: str, workers: Callable[[], BodyWorkerPool] | None = None
) -> ServedModel:
    """Return the model of an engine, whose files are read; its guides are tried by `workers`, if there are any."""

    async def try_out(client: str, guide: Guide) -> None:
        assert workers is not None, "asked only if there are some"
        body = GuideTrial(guide=guide.model_dump_json())
        await workers().read(client, GuideTrial, body.model_dump_json().encode())

    max_model_len = engine.plan.settings.max_model_len
    text = ModelText(engine.tokenizer, engine.chat_template, engine.media, engine.vocab_size, max_model_len, settings)
    context = RequestContext(text, settings, model_name, engine.default_params)
    digest = checkpoint_digest(engine.started.directory)
    return ServedModel(engine, text, GuideCompiler(engine, try_out if workers else None), context, digest)


class GenerationRun:
    """One HTTP request in the engine: a stream per prompt, and counts of the tokens generated so far."""

    def __init__(self) -> None:
        self.streams: list[RequestStream] = []
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None
        """Number of completion_tokens that are reasoning; None if the endpoint does not count reasoning separately."""
        self.marks: Mapping[str, Mark] = {}
        """Marks of the prompts by their places in the body."""
        self.missing_marks: tuple[str, ...] = ()
        """Places in the body of marks that the engine did not get as they were asked for."""
        self._num_ended = 0

    @classmethod
    async def start(
        cls,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        body: GenerationBody,
        deadline: float,
        record: RequestRecord,
        guide: Guide | None = None,
        media: MediaPrompt | None = None,
        client: str | None = None,
        marks: Mapping[str, Mark] | None = None,
    ) -> GenerationRun:
        """Submit every prompt, as token ids. If one is refused, none runs, and its error is raised.

        `deadline` is in seconds. `record` is that of the HTTP request. `media` belongs to the only prompt. `client` is
        the client that sent it. `marks` are those of every prompt, by their places in the body.
        """
        if guide is not None:
            params = params.replace(guide=guide)
        run = cls()
        run.marks = marks or {}
        record.figures = run.figures
        try:
            for prompt in prompts:
                stream = await engine.submit(
                    prompt,
                    params,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                    media=media,
                    deadline=deadline,
                    client=client,
                    arrival=record.begun,
                    marks=tuple(run.marks.values()),
                )
                run.streams.append(stream)
        except BaseException:
            run.close()
            raise
        return run

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """Yield (index of the prompt, output delta) as they come."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield 0, self._counted(delta)
            return
        news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(maxsize=len(self.streams))
        tasks = [asyncio.create_task(_forward(place, stream, news)) for place, stream in enumerate(self.streams)]
        try:
            running = len(tasks)
            while running:
                item = await news.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item[0], self._counted(item[1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def has_ended(self) -> bool:
        """True if `deltas` has yielded everything, and no error follows."""
        return self._num_ended == len(self.streams)

    def count_reasoning(self, answers: Sequence[ChatOutput], outputs: Iterable[CompletionOutput]) -> None:
        """Set `reasoning_tokens` to those of all `outputs`, which have ended; `answers` are by index of an output."""
        counts = (answers[output.index].reasoning_tokens(output.token_ids) for output in outputs)
        self.reasoning_tokens = sum(counts)

    def close(self) -> None:
        """Abort the streams that are not finished, and drop what they hold."""
        for stream in self.streams:
            stream.close()

    def checked(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield parts of the answer; raise the error of a stream that was ended meanwhile."""
        for part in parts:
            for stream in self.streams:
                stream.raise_error()
            yield part

    @property
    def num_created_tokens(self) -> int:
        """Prompt tokens after the hits and up to the last marks that are pinned."""
        return sum(stream.num_created_tokens for stream in self.streams)

    def usage(self, without_output: bool = False) -> JsonObject:
        """Return OpenAI's `usage`; `without_output` if the client asked for no output."""
        completion_tokens = 0 if without_output else self.completion_tokens
        prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self.streams)
        cached = sum(stream.num_cached_tokens or 0 for stream in self.streams)
        created = self.num_created_tokens
        details = {} if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                **({"cache_creation_tokens": created} if created else {}),
            },
            "completion_tokens_details": details or None,
        }

    def figures(self) -> JsonObject:
        """Return the request's measurements for log and trace; see `RequestRecord.figures`."""
        streams = self.streams
        if not streams:
            return {}
        times = [stream.times for stream in streams if stream.times is not None]
        reasons = dict.fromkeys(reason for stream in streams for reason in stream.finish_reasons)
        return {
            "prompt_tokens": sum(len(stream.prompt_token_ids) for stream in streams),
            "completion_tokens": sum(stream.num_output_tokens for stream in streams),
            "cached_tokens": sum(stream.num_cached_tokens or 0 for stream in streams),
            "scheduled": min((each.scheduled for each in times if each.scheduled is not None), default=None),
            "first_token": min((each.first_token for each in times if each.first_token is not None), default=None),
            "last_token": max((each.last_token for each in times if each.last_token is not None), default=None),
            "finish": ",".join(reasons) or None,
        }

    def _counted(self, delta: OutputDelta) -> OutputDelta:
        self.completion_tokens += sum(len(sample.token_ids) for sample in delta.samples)
        self._num_ended += delta.output is not None and delta.output.error is None
        return delta


async def _forward(
    place: int, stream: RequestStream, news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None]
) -> None:
    try:
        async for delta in stream:
            await news.put((place, delta))
    except Exception as error:
        await news.put(error)
    else:
        await news.put(None)


@dataclass(frozen=True)
class ConversationRequest:
    """A conversation, and the kind of answer that it asks for."""

    conversation: Conversation
    tools: tuple[Tool, ...]
    """The tools that the answer may call."""
    tool_choice: object
    parallel: bool
    """True if the answer may have several calls."""
    guide: GuideRequest | None
    param: str
    """The field of the body that holds the conversation."""


@dataclass(frozen=True)
class PreparedChat:
    """A conversation in the engine's form, and the parts that its answer may have."""

    params: SamplingParams
    token_ids: list[int]
    media: MediaPrompt | None
    tools: tuple[Tool, ...]
    starts_in_reasoning: bool
    parallel: bool
    calls_or_content: bool
    """Value of `AnswerLayout.calls_or_content`."""
    guide: GuidePlan | None
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Positions at which the client wants checkpoints, by the places of their marks in the body."""
    missing_marks: tuple[str, ...] = ()
    """Places in the body of marks whose positions cannot be located."""
    is_plain: bool = False
    """True if the prompt is no conversation, so that the whole answer is content."""

    def with_all_marks(self) -> PreparedChat:
        """Return this conversation. ApiError if one of its marks cannot be located."""
        for where in self.missing_marks:
            raise field_error(where, "cannot be located: the chat template does not give out what it follows as it is")
        return self

    def layout(self, text: ModelText) -> AnswerLayout:
        """Return the parts that the answer may consist of."""
        if self.is_plain:
            return AnswerLayout(AnswerFormats(), (), starts_in_reasoning=False, parallel=True, calls_or_content=False)
        # A stop string or token may end an answer inside of a call, as if the model had.
        enforced = self.guide is not None and not (self.params.stop or self.params.stop_token_ids)
        formats = text.formats_with(self.tools)
        return AnswerLayout(
            formats, self.tools, self.starts_in_reasoning, self.parallel, self.calls_or_content, enforced
        )


def prepare_chat(
    context: RequestContext,
    asked: ConversationRequest,
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> PreparedChat:
    """Prepare a conversation for the engine. `logprobs`: number of likely tokens returned at each place, or None."""
    text = context.text
    more = {"max_tokens": max_tokens, **text.shows_tags(body.skip_special_tokens)}
    if logprobs is not None:
        more["logprobs"] = logprobs
    params = body.sampling(context.default_params, **more)
    rendered = render(context, asked.conversation, asked.param)
    token_ids = token_ids_of(context, rendered, asked.param)
    check_prompt_length(len(token_ids), text.max_model_len, asked.param)
    inside = starts_in_reasoning(text.formats, asked.conversation, rendered.text)
    layout = AnswerLayout(
        text.formats_with(asked.tools), asked.tools, inside, asked.parallel, calls_or_content=asked.guide is not None
    )
    guide = answer_guide(text, layout, asked.guide, asked.tool_choice)
    body.check_guide(guide)
    marks, missing = (
        locate_marks(context, asked.conversation, rendered, token_ids) if asked.conversation.marks else ({}, ())
    )
    return PreparedChat(
        params,
        token_ids,
        rendered.media,
        asked.tools,
        inside,
        asked.parallel,
        layout.calls_or_content,
        guide,
        marks,
        tuple(missing),
    )


async def start_chat(
    engine: AsyncEngine,
    compiler: GuideCompiler,
    prepared: PreparedChat,
    body: GenerationBody,
    deadline: float,
    request: Request,
) -> GenerationRun:
    """Submit a conversation to the engine."""
    record, client = request.state.record, request.state.client
    engine.queue_limit.check(prepared.params.n, client)
    guide = await compiler.compiled(prepared.guide, client)
    prompts, media = [prepared.token_ids], prepared.media
    run = await GenerationRun.start(
        engine, prompts, prepared.params, body, deadline, record, guide, media, client, prepared.marks
    )
    run.missing_marks = prepared.missing_marks
    return run


async def whole_response(
    request: Request, run: GenerationRun, whole: Coroutine[object, object, Iterable[str | bytes]], slices: LoopSlices
) -> Response:
    """Return the response with the whole JSON, which `whole` gives in parts. `run` ends with it.

    A JSON that is longer than a piece is made while the client takes it.
    """
    try:
        parts = await cancel_on_disconnect(request, whole)
        pieces = slices.pieces(run.checked(parts))
        first = await anext(pieces)
        if len(first) >= PIECE:
            return ChunkedJson(_resumed(first, pieces), run.close)
    except BaseException:
        run.close()
        raise
    run.close()
    return Response(first, media_type="application/json")


async def _resumed(first: bytes, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the first piece and the others."""
    async with aclosing(pieces):
        yield first
        async for piece in pieces:
            yield piece


async def in_slices(slices: LoopSlices | None, events: Iterable[Iterable[Any]], is_last: bool) -> AsyncGenerator[bytes]:
    """Yield events, of parts, in pieces, or as one text without `slices`. With `is_last` the last ends the answer."""
    parts = chain.from_iterable(events)
    if slices is None:
        waiting = "".join(parts).encode()
    else:
        async with aclosing(slices.pieces(parts)) as pieces:
            waiting = await anext(pieces)
            async for piece in pieces:
                yield waiting
                waiting = piece
    if is_last:
        yield LastEvents(waiting)
    elif waiting:
        yield waiting


def head(prefix: str, kind: str, request_id: str, model: str) -> JsonObject:
    """Return the members that every part of an answer begins with."""
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


_encode = json.JSONEncoder(separators=(",", ":")).encode


def compact(value: object) -> str:
    """Return JSON without white space, in ASCII: text that a client sent may not be encodable."""
    return _encode(value)


def end_members(finish_reason: str | None, stop_reason: int | str | None) -> str:
    """Return why a choice ended as members of its JSON. `stop_reason` tells the context's limit from max_tokens."""
    reason = "null" if finish_reason is None else f'"{finish_reason}"'
    more = f',"stop_reason":"{stop_reason}"' if finish_reason == "length" and stop_reason is not None else ""
    return f'"finish_reason":{reason}{more}'


class ChunkWriter:
    """Writer of the events of one stream. Their common part is serialised once. `choices` are JSON texts."""

    def __init__(self, head: JsonMapping, body: GenerationBody, usage: Callable[[], JsonMapping]) -> None:
        """Write events as `body` asks for them; `usage` returns the usage so far."""
        self.include_usage, self._continuous, self._usage = body.include_usage, body.continuous_usage, usage
        self._before = f'data: {compact(head)[:-1]},"choices":['
        self._after = '],"usage":null}\n\n' if self.include_usage else "]}\n\n"

    def event_parts(self, choice: Iterable[str]) -> Iterator[str]:
        """Yield the parts of an event; `choice` are parts of a JSON text."""
        yield self._before
        yield from choice
        yield self._end() if self._continuous else self._after

    def usage(self) -> str:
        """Return the last event, which has the usage and no choice."""
        return self._before + self._end()

    def _end(self) -> str:
        return f'],"usage":{compact(self._usage())}}}\n\n'


def whole_body(
    head: Mapping[str, object], choices: Iterable[Iterable[str]], usage: Mapping[str, object]
) -> Iterator[str]:
    """Yield the parts of an answer that is not streamed; `choices` are the parts of JSON texts."""
    yield f'{compact(head)[:-1]},"choices":['
    yield from joined(choices)
    yield f'],"usage":{compact(usage)}}}'


def joined(items: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the parts of items with commas between the items."""
    for number, item in enumerate(items):
        if number:
            yield ","
        yield from item
