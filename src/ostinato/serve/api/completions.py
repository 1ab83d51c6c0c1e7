"""`POST /v1/completions`: text continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.output_deltas import PackedLogprobs, SampleDelta, join_samples
from ostinato.json_io import JsonObject
from ostinato.kv_cache.marks import Mark
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.api.generation_fields import MAX_LOGPROBS, GenerationBody, Prompts, prompts_in, token_ids
from ostinato.serve.api.generation_run import (
    ChunkWriter,
    GenerationRun,
    ServedModel,
    end_members,
    head,
    in_slices,
    quoted,
    whole_body,
    whole_response,
)
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.cache_marks import read_positions
from ostinato.serve.chat.guides import GuidePlan, plain_guide
from ostinato.serve.chat.text_support import CompletionLogprobs, ModelText
from ostinato.serve.http.api_errors import field_error
from ostinato.serve.http.json_bodies import ListOf, unsupported_field
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import DONE, EventStream, LoopSlices


@dataclass(frozen=True)
class PreparedCompletion:
    """Prompts in the engine's form."""

    params: SamplingParams
    prompts: list[list[int]]
    echoes: list[str]
    """The text that each prompt's outputs begin with."""
    guide: GuidePlan | None
    scores_only: bool
    marks: Mapping[str, Mark]
    """Positions at which the client wants checkpoints, by the places of their marks in the body."""


class CompletionRequest(GenerationBody):
    prompt: Prompts
    """Text or token ids; several in a list."""
    max_tokens: int | None = Field(16, ge=0)
    """Most tokens of output; null: as many as there is room for; 0: only score the prompt, which needs `echo`."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Return the log-probability of each token, and this number of the most likely tokens."""
    echo: bool | None = None
    """Begin the text with the prompt, and the log-probabilities with those of its tokens."""
    cache_breakpoints: ListOf[int | JsonObject] | None = None
    """Positions up to which later prompts will share this one, at most 4: characters of a text, or token ids.

    Each is a number, or `{"after": a number, "ttl": "5m", "1h" or seconds}`. A checkpoint is kept there, and pinned for
    its time.
    """
    suffix: Annotated[Literal[""] | None, unsupported_field("a prompt is only continued at its end", but="")] = None
    best_of: Annotated[
        Literal[1] | None, unsupported_field("ask for n outputs with logprobs, and choose among them", but=1)
    ] = None

    def prepare(self, context: RequestContext) -> PreparedCompletion:
        prompts = prompts_in(self.prompt, "prompt")
        self.check(context.settings, context.model_name, len(prompts))
        self.check_echo()
        params = _params(self, context.default_params)
        ids = [token_ids(context, prompt, "prompt") for prompt in prompts]
        echoes = _echoes(context.text, self, prompts, params.skip_special_tokens)
        if self.cache_breakpoints and len(prompts) > 1:
            raise field_error("cache_breakpoints", f"is for one prompt, and there are {len(prompts)}")
        marks = read_positions(context, self.cache_breakpoints, prompts[0], ids[0])
        guide = plain_guide(self.guide_request())
        self.check_guide(guide)
        return PreparedCompletion(params, ids, echoes, guide, self.max_tokens == 0, marks)

    def check_echo(self) -> None:
        """Raise ApiError for fields that need `echo`."""
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "0 needs echo: there would be no text")


def completions_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts; with `stream`, in server-sent events."""
        model = served_model()
        prepared: PreparedCompletion = request.state.prepared
        client = request.state.client
        model.engine.queue_limit.check(len(prepared.prompts) * prepared.params.n, client)
        guide = await model.compiler.compiled(prepared.guide, client)
        deadline, record = body.deadline(lifecycle.settings), request.state.record
        params = prepared.params
        run = await GenerationRun.start(
            model.engine, prepared.prompts, params, body, deadline, record, guide, client=client, marks=prepared.marks
        )
        form = _ChoiceForm(model.text, params, prepared.echoes, prepared.scores_only)
        own = head("cmpl", "text_completion", request.state.request_id, lifecycle.model_name)
        if body.stream:
            writer = ChunkWriter(own, body, partial(run.usage, form.scores_only))
            return EventStream(_events(run, form, writer, model.slices), run.close)
        return await whole_response(request, run, _whole(run, form, own), model.slices)

    return router


def _params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    more = {}
    if body.logprobs is not None:
        more["logprobs"] = body.logprobs
        if body.echo:
            more["prompt_logprobs"] = body.logprobs
    # To score only a prompt, the engine computes one token after it, which is not returned.
    return body.sampling(defaults, max_tokens=1 if body.max_tokens == 0 else body.max_tokens, **more)


def _echoes(
    text: ModelText, body: CompletionRequest, prompts: Sequence[str | list[int]], skip_special_tokens: bool
) -> list[str]:
    """Return the text that each prompt's outputs begin with."""
    if not body.echo:
        return [""] * len(prompts)
    decode = text.tokenizer.decode
    return [each if isinstance(each, str) else decode(each, skip_special_tokens) for each in prompts]


@dataclass(frozen=True)
class _Echo:
    """Beginning of an output: its prompt's text, and its tokens if log-probabilities were requested."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()


_NOTHING = _Echo()


@dataclass(frozen=True)
class _ChoiceForm:
    """Form of the choices that outputs become."""

    text: ModelText
    params: SamplingParams
    echoes: Sequence[str]
    scores_only: bool

    @property
    def num_samples(self) -> int:
        return self.params.n

    def echo_of(self, place: int, run: GenerationRun) -> _Echo:
        """Return the echo that one prompt's outputs begin with."""
        stream = run.streams[place]
        if stream.prompt_logprobs is None:
            return _Echo(self.echoes[place])
        return _Echo(self.echoes[place], stream.prompt_token_ids, stream.prompt_logprobs)

    def logprobs(self) -> CompletionLogprobs | None:
        """Return the writer of one output's log-probabilities; None if they were not requested."""
        if self.params.logprobs is None:
            return None
        return CompletionLogprobs(self.text.token_texts, self.text.tokenizer, self.params.skip_special_tokens)


def _choice(
    index: int, text: str, logprobs: Iterable[str], sample: SampleDelta | CompletionOutput, scores_only: bool
) -> Iterator[str]:
    """Yield the parts of a choice; `logprobs` are parts too."""
    end = end_members("length", None) if scores_only else end_members(sample.finish_reason, sample.stop_reason)
    yield f'{{"index":{index},"text":{quoted(text)},"logprobs":'
    yield from logprobs
    yield f",{end}}}"


_NULL = ("null",)


async def _events(
    run: GenerationRun, form: _ChoiceForm, chunks: ChunkWriter, slices: LoopSlices
) -> AsyncGenerator[bytes]:
    n = form.num_samples
    logprobs = [form.logprobs() for _ in range(n * len(run.streams))]
    begun: set[int] = set()
    held = _AwaitingPromptLogprobs(form)
    async for place, delta in run.deltas():
        events: list[Iterable[str]] = []
        stream = run.streams[place]
        for sample in held.released(place, delta.samples, stream.prompt_logprobs):
            index = place * n + sample.sample_index
            before = form.echo_of(place, run) if index not in begun else _NOTHING
            begun.add(index)
            if event := _streamed(index, before, sample, logprobs[index], form.scores_only):
                events.append(chunks.event_parts(event))
        if run.has_ended:
            events.append([chunks.usage() if chunks.include_usage else "", DONE.decode()])
        async for piece in in_slices(slices if form.params.logprobs is not None else None, events, run.has_ended):
            yield piece


class _AwaitingPromptLogprobs:
    """Buffer of outputs until the log-probabilities of their prompt are there, which come with its first output."""

    def __init__(self, form: _ChoiceForm) -> None:
        self._waits = form.params.prompt_logprobs is not None
        self._samples: dict[int, dict[int, SampleDelta]] = {}

    def released(
        self, place: int, samples: Sequence[SampleDelta], prompt_logprobs: Sequence[TokenLogprobs | None] | None
    ) -> Sequence[SampleDelta]:
        """Return what can be sent of one prompt's outputs after the new `samples`."""
        if not self._waits:
            return samples
        held = self._samples.setdefault(place, {})
        for sample in samples:
            before = held.get(sample.sample_index)
            held[sample.sample_index] = sample if before is None else join_samples((before, sample))
        if prompt_logprobs is None:
            return ()
        del self._samples[place]
        return [held[index] for index in sorted(held)]


def _streamed(
    index: int, before: _Echo, sample: SampleDelta, logprobs: CompletionLogprobs | None, scores_only: bool
) -> Iterator[str] | None:
    """Return the parts of a chunk's choice; None if it would be empty."""
    text, tokens, of_tokens = sample.text, sample.token_ids, sample.logprobs or ()
    if scores_only:
        text, tokens, of_tokens = "", (), ()
    found: Iterable[str] = _NULL
    if logprobs is not None and (before.token_ids or tokens):
        found = logprobs.parts([*before.token_ids, *tokens], PackedLogprobs.join((before.logprobs, of_tokens)))
    elif not (before.text or text or sample.finish_reason):
        return None
    return _choice(index, before.text + text, found, sample, scores_only)


async def _whole(run: GenerationRun, form: _ChoiceForm, own: JsonObject) -> Iterator[str]:
    outputs: dict[int, CompletionOutput] = {}
    async for place, delta in run.deltas():
        for sample in delta.output.outputs if delta.output is not None else ():
            outputs[place * form.num_samples + sample.index] = sample
    choices = (
        _complete(index, form.echo_of(index // form.num_samples, run), outputs[index], form)
        for index in sorted(outputs)
    )
    return whole_body(own, choices, run.usage(form.scores_only))


def _complete(index: int, before: _Echo, sample: CompletionOutput, form: _ChoiceForm) -> Iterator[str]:
    text, token_ids, logprobs = sample.text, sample.token_ids, sample.logprobs
    if form.scores_only:
        text, token_ids, logprobs = "", [], logprobs and []
    writer = form.logprobs()
    found: Iterable[str] = _NULL
    if writer is not None and logprobs is not None:
        found = writer.parts([*before.token_ids, *token_ids], PackedLogprobs.join((before.logprobs, logprobs)))
    return _choice(index, before.text + text, found, sample, form.scores_only)
