"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and what its clients ask about the model.

An answer is a JSON object, or one object for each of its parts, in lines. Times are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain

from fastapi import Request
from fastapi.responses import Response

from ostinato._version import __version__
from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.output_deltas import SampleDelta
from ostinato.json_io import JsonObject
from ostinato.serve.api.embeddings import EmbeddingRun
from ostinato.serve.api.generation_run import GenerationRun, ServedModel, compact, joined, start_chat, whole_response
from ostinato.serve.api.ollama_request import (
    OllamaBody,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from ostinato.serve.chat.answer_formats import ToolCallDelta
from ostinato.serve.chat.chat_output import ChatOutput, arguments_of
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import JSON_LINES, EventStream, LastEvents

PREFIX = "/api"
_NEVER = "9999-12-31T00:00:00Z"
"""Time at which the model is unloaded."""
_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


def ollama_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter(PREFIX, dialect="ollama")

    async def answer(body: OllamaBody, request: Request, is_chat: bool) -> Response:
        model, prepared = served_model(), request.state.prepared
        if prepared is None:
            loaded = {**_head(lifecycle), **_part("", is_chat), "done": True, "done_reason": "load"}
            return _lines_or_json(loaded, body.stream)
        deadline = body.deadline(lifecycle.settings)
        run = await start_chat(model.engine, model.compiler, prepared, body, deadline, request)
        output = ChatOutput(model.text, prepared.layout(model.text))
        written = _Answer(run, output, lifecycle, is_chat, request.state.record.begun)
        streams = body.stream is not False
        if streams:
            return EventStream(written.lines(), run.close, JSON_LINES)
        return await whole_response(request, run, written.whole(), model.slices)

    @router.post("/chat", response_model=None)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation in Ollama's form: JSON in lines, unless `stream` is false."""
        return await answer(body, request, is_chat=True)

    @router.post("/generate", response_model=None)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt, or continue it as it is with `raw`."""
        return await answer(body, request, is_chat=False)

    @router.post("/embed", response_model=None)
    async def embed_inputs(body: OllamaEmbedRequest, request: Request) -> Response:
        """Return a vector of each input."""
        model, record = served_model(), request.state.record
        inputs = EmbeddingRun(model.engine, body, request, lifecycle.settings.request_timeout)

        async def whole() -> Iterator[str]:
            await inputs.compute()
            counts = {"prompt_eval_count": inputs.run.usage()["prompt_tokens"], **_times(inputs.run, record.begun)}
            own = {"model": lifecycle.model_name, **counts}
            return chain([compact(own)[:-1], ',"embeddings":['], joined([each] for each in inputs.vectors()), ["]}"])

        return await whole_response(request, inputs.run, whole(), model.slices)

    @router.post("/embeddings", response_model=None)
    async def embed_prompt(body: OllamaEmbeddingRequest, request: Request) -> Response:
        """Return the vector of one prompt, in the older form."""
        model = served_model()
        inputs = EmbeddingRun(model.engine, body, request, lifecycle.settings.request_timeout)

        async def whole() -> Iterator[str]:
            await inputs.compute()
            return chain(['{"embedding":'], inputs.vectors(), ["}"])

        return await whole_response(request, inputs.run, whole(), model.slices)

    @router.post("/show", response_model=None)
    async def show(body: ShowRequest, request: Request) -> Response:  # noqa: ARG001
        """Describe the model."""
        return Response(compact(_shown(served_model(), lifecycle)), media_type="application/json")

    return router


def ollama_reports_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter(PREFIX, dialect="ollama")

    @router.get("/tags")
    async def tags() -> JsonObject:
        """Return the models that may be asked for: the names of the one that is served."""
        digest = served_model().digest
        return {"models": [_listed(lifecycle, name, digest) for name in _names(lifecycle)]}

    @router.get("/ps")
    async def loaded() -> JsonObject:
        """Return the model, which stays loaded."""
        plan = lifecycle.engine.plan
        vram = plan.memory.weights if plan.device.kind != "cpu" else 0
        more = {"expires_at": _NEVER, "size_vram": vram, "context_length": plan.settings.max_model_len}
        digest = served_model().digest
        return {"models": [_listed(lifecycle, name, digest) | more for name in _names(lifecycle)]}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}

    return router


class _Answer:
    """One answer while it grows."""

    def __init__(
        self, run: GenerationRun, output: ChatOutput, lifecycle: Lifecycle, is_chat: bool, begun: float
    ) -> None:
        self._run, self._output, self._is_chat, self._begun = run, output, is_chat, begun
        self._lifecycle = lifecycle
        self._call: ToolCallDelta | None = None
        """The call that grows: a call is sent whole."""

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield the lines of a stream. The last one has the counts."""
        async for _, delta in self._run.deltas():
            lines: list[JsonObject] = []
            for sample in delta.samples:
                part = self._taken(sample)
                if part is not None:
                    lines.append({**_head(self._lifecycle), **part, "done": False})
            if delta.output is not None and delta.output.error is None:
                [whole] = delta.output.outputs
                lines.append(self._end(whole, _part("", self._is_chat)))
            text = "".join(f"{compact(line)}\n" for line in lines).encode()
            if self._run.has_ended:
                yield LastEvents(text)
            elif text:
                yield text

    async def whole(self) -> list[str]:
        """Return the whole answer as JSON, in one part."""
        answer: JsonObject = {}
        async for _, delta in self._run.deltas():
            if delta.output is not None:
                [whole] = delta.output.outputs
                answer = self._end(whole, self._taken(whole) or _part("", self._is_chat))
        return [compact(answer)]

    def _taken(self, piece: SampleDelta | CompletionOutput) -> JsonObject | None:
        """Return what a piece adds, with whole calls; None if that is nothing."""
        delta, calls = self._output.take(piece), []
        for call in delta.tool_calls:
            if call.name is not None:
                calls += self._ended_call()
                self._call = call
            elif self._call is not None:
                before = self._call
                self._call = ToolCallDelta(before.index, before.id, before.name, before.arguments + call.arguments)
        if piece.finish_reason is not None:
            calls += self._ended_call()
        if not (delta.content or delta.reasoning or calls):
            return None
        return _part(delta.content, self._is_chat, delta.reasoning, calls)

    def _ended_call(self) -> list[JsonObject]:
        """Return the call that has ended, if there is one."""
        call, self._call = self._call, None
        if call is None:
            return []
        function = {"index": call.index, "name": call.name, "arguments": arguments_of(call.arguments)}
        return [{"id": call.id, "function": function}]

    def _end(self, output: CompletionOutput, part: JsonObject) -> JsonObject:
        """Return the last object: why the answer ended, its counts and times."""
        self._run.count_reasoning([self._output], [output])
        usage, reason = self._run.usage(), "length" if output.finish_reason == "length" else "stop"
        counts = {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
        times = _times(self._run, self._begun)
        return {**_head(self._lifecycle), **part, "done": True, "done_reason": reason, **times, **counts}


def _head(lifecycle: Lifecycle) -> JsonObject:
    return {"model": lifecycle.model_name, "created_at": _time(datetime.now(UTC))}


def _part(content: str, is_chat: bool, thinking: str = "", calls: Iterable[JsonObject] = ()) -> JsonObject:
    """Return the members of an answer that hold its text: a message, or the fields of a completion."""
    more: JsonObject = {"thinking": thinking} if thinking else {}
    if not is_chat:
        return {"response": content, **more}
    tool_calls = list(calls)
    if tool_calls:
        more["tool_calls"] = tool_calls
    return {"message": {"role": "assistant", "content": content, **more}}


def _times(run: GenerationRun, begun: float) -> dict[str, int]:
    """Return the durations of a request, in nanoseconds. The model was loaded before."""
    figures = run.figures()
    scheduled, first, last = (figures.get(name) for name in ("scheduled", "first_token", "last_token"))
    durations = {
        "total_duration": (begun, last),
        "prompt_eval_duration": (scheduled, first),
        "eval_duration": (first, last),
    }
    known = {
        name: max(0, round((end - start) * 1e9))
        for name, (start, end) in durations.items()
        if start is not None and end is not None
    }
    return {"load_duration": 0, **known}


def _lines_or_json(value: JsonObject, stream: bool | None) -> Response:
    if stream is False:
        return Response(compact(value), media_type="application/json")
    return Response(f"{compact(value)}\n", media_type=JSON_LINES)


def _names(lifecycle: Lifecycle) -> tuple[str, ...]:
    return tuple(lifecycle.settings.served_model_name or (lifecycle.model_name,))


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _listed(lifecycle: Lifecycle, name: str, digest: str) -> JsonObject:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.fromtimestamp(lifecycle.created, UTC)),
        "size": lifecycle.engine.plan.memory.weights,
        "digest": digest,
        "details": _details(lifecycle),
    }


def _details(lifecycle: Lifecycle) -> JsonObject:
    plan = lifecycle.engine.plan
    family, settings = plan.model.architecture, plan.settings
    return {
        "parent_model": "",
        "format": "gguf" if str(settings.model).endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(plan.model.parameters),
        "quantization_level": str(settings.quantization or settings.dtype),
    }


def _rounded(count: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 3.3M."""
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _shown(model: ServedModel, lifecycle: Lifecycle) -> JsonObject:
    plan, text = model.engine.plan, model.text
    spec, family = plan.model, plan.model.architecture
    capabilities = {
        "completion": True,
        "embedding": True,
        "vision": text.media is not None,
        "tools": text.takes_tools,
        "thinking": text.formats.reasoning is not None,
    }
    template = model.engine.chat_template.as_stored
    defaults = model.engine.default_params
    parameters = ("temperature", "top_p", "top_k", "min_p")
    return {
        "digest": model.digest,
        "modelfile": f"FROM {plan.settings.model}",
        "parameters": "\n".join(f"{name} {getattr(defaults, name)}" for name in parameters),
        "template": template if isinstance(template, str) else compact(template) if template else "",
        "license": "",
        "details": _details(lifecycle),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": spec.parameters,
            f"{family}.context_length": plan.settings.max_model_len,
            f"{family}.embedding_length": spec.hidden_size,
            f"{family}.block_count": sum(spec.layers.values()),
            f"{family}.vocab_size": spec.vocab_size,
        },
        "capabilities": [name for name, has in capabilities.items() if has],
        "modified_at": _time(datetime.fromtimestamp(lifecycle.created, UTC)),
    }
