"""`POST /v1/chat/completions`: conversations answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.output_deltas import SampleDelta
from ostinato.json_io import JsonObject
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.api.generation_fields import MAX_LOGPROBS, GenerationBody, num_logprobs
from ostinato.serve.api.generation_run import (
    ChunkWriter,
    ConversationRequest,
    GenerationRun,
    PreparedChat,
    ServedModel,
    compact,
    end_members,
    head,
    in_slices,
    prepare_chat,
    quoted,
    start_chat,
    whole_body,
    whole_response,
)
from ostinato.serve.body_workers.context import RequestContext
from ostinato.serve.chat.answer_formats import AnswerDelta, ToolCallDelta
from ostinato.serve.chat.cache_marks import read_breakpoints
from ostinato.serve.chat.chat_output import ChatOutput
from ostinato.serve.chat.conversation import ConversationBody, check_counts, checked_tools, conversation_of
from ostinato.serve.chat.guides import GuideRequest
from ostinato.serve.chat.text_support import TokenStrings
from ostinato.serve.http.api_errors import ApiError, field_error
from ostinato.serve.http.json_bodies import Body, Ignored, ListOf, unsupported_field
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import DONE, EventStream, LoopSlices


class JsonSchema(Body):
    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    """The JSON schema of the output; null: any object."""
    strict: bool | None = None
    """The output follows the schema in any case."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationBody, ConversationBody):
    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of output, reasoning included (as many as there is room for)."""
    max_tokens: int | None = Field(None, ge=1)
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Return the log-probability of every token of output, also of reasoning and tool calls."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of the most likely tokens to return at each place; needs logprobs."""
    response_format: ResponseFormat | None = None
    """The form of the answer after any reasoning."""
    tool_choice: str | JsonObject | None = None
    """Tools that the model may or must call.

    `none` (the model does not see the tools), `auto`, `required`, one function by name, or `allowed_tools`: the model
    sees all tools, and calls only the allowed ones.
    """
    parallel_tool_calls: bool | None = None
    """False: at most one call. Where calls are free, those after the first are dropped."""
    cache_breakpoints: ListOf[int | JsonObject] | None = None
    """Positions up to which later prompts will share this one, at most 4.

    Each is the index of a message, or `{"after": "system", "tools" or an index, "ttl": "5m", "1h" or seconds}`. A
    checkpoint is kept there, and pinned for its time.
    """
    store: Annotated[Literal[False] | None, unsupported_field("nothing is stored", but=False)] = None
    """Nothing is stored."""
    modalities: list[Literal["text"]] | None = None
    """Only text is served."""
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    functions: Annotated[None, unsupported_field("use tools")] = None
    function_call: Annotated[None, unsupported_field("use tool_choice")] = None
    audio: Annotated[None, unsupported_field("only text is")] = None
    web_search_options: Annotated[None, unsupported_field("give the model a tool that searches")] = None

    def prepare(self, context: RequestContext) -> PreparedChat:
        self.check(context.settings, context.model_name)
        check_counts(self.messages, self.tools, context.settings)
        guide = self.guide_request()
        tools = checked_tools(context.text, self.tools, self.tool_choice)
        conversation = conversation_of(context.text, self, tools.offered_tools)
        if self.cache_breakpoints:
            roles = [message.role for message in self.messages]
            num_tools = len(conversation.tools or ())
            marks = read_breakpoints(self.cache_breakpoints, roles, num_tools, range(len(roles)))
            conversation = replace(conversation, marks=marks)
        parallel = self.parallel_tool_calls is not False
        asked = ConversationRequest(conversation, tools.callable, tools.choice, parallel, guide, "messages")
        logprobs = num_logprobs(self.top_logprobs, bool(self.logprobs), "logprobs to be true")
        prepared = prepare_chat(context, asked, self, max_tokens=self.max_output(), logprobs=logprobs)
        return prepared.with_all_marks()

    def parameter_fields(self) -> dict[str, str]:
        renamed = {"logprobs": "top_logprobs"}
        return renamed if self.max_completion_tokens is None else renamed | {"max_tokens": "max_completion_tokens"}

    def max_output(self) -> int | None:
        """Return the most tokens of output. ApiError if the two names for it disagree."""
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            message = f"max_completion_tokens is {new} and max_tokens, which means the same, {old}; give one"
            raise ApiError(400, message, param="max_tokens")
        return old if new is None else new

    def _format_request(self) -> GuideRequest | None:
        """Return the guide that `response_format` asks for. ApiError for a type json_schema without a schema."""
        asked, param = self.response_format, "response_format.json_schema"
        if asked is None:
            return None
        if asked.type != "json_schema":
            if asked.json_schema is not None:
                raise field_error(param, "goes with the type json_schema")
            return GuideRequest("response_format", "json_object", True) if asked.type == "json_object" else None
        if asked.json_schema is None:
            raise field_error(param, "should be given with this type")
        if asked.json_schema.schema_ is None:
            return GuideRequest("response_format", "json_object", True)
        return GuideRequest(f"{param}.schema", "json_schema", asked.json_schema.schema_)


def chat_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation; with `stream`, in server-sent events."""
        model = served_model()
        prepared: PreparedChat = request.state.prepared
        deadline = body.deadline(lifecycle.settings)
        run = await start_chat(model.engine, model.compiler, prepared, body, deadline, request)
        text, params, layout = model.text, prepared.params, prepared.layout(model.text)
        answers = [ChatOutput(text, layout) for _ in range(params.n)]
        texts = None if params.logprobs is None else text.token_texts
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        own = head("chatcmpl", kind, request.state.request_id, lifecycle.model_name)
        if body.stream:
            return EventStream(_events(run, answers, texts, ChunkWriter(own, body, run.usage), model.slices), run.close)
        return await whole_response(request, run, _whole(run, answers, texts, own), model.slices)

    return router


async def _events(
    run: GenerationRun,
    answers: Sequence[ChatOutput],
    texts: TokenStrings | None,
    chunks: ChunkWriter,
    slices: LoopSlices,
) -> AsyncGenerator[bytes]:
    begun: set[int] = set()
    async for _, delta in run.deltas():
        events: list[Iterable[str]] = []
        for sample in delta.samples:
            index = sample.sample_index
            choice = _streamed(sample, answers[index], texts, begins=index not in begun)
            if choice is not None:
                begun.add(index)
                events.append(chunks.event_parts(choice))
        if delta.output is not None:
            run.count_reasoning(answers, delta.output.outputs)
        if run.has_ended:
            events.append([chunks.usage() if chunks.include_usage else "", DONE.decode()])
        async for piece in in_slices(slices if texts else None, events, run.has_ended):
            yield piece


def _streamed(
    sample: SampleDelta, answer: ChatOutput, texts: TokenStrings | None, begins: bool
) -> Iterator[str] | None:
    """Return the parts of a chunk's choice; None if it would be empty."""
    delta = _delta(answer.take(sample), begins)
    if not (delta or sample.finish_reason or (texts is not None and sample.logprobs)):
        return None
    if begins:
        delta = f'"role":"assistant",{delta}' if delta else '"role":"assistant","content":""'
    body, end = f'{{"index":{sample.sample_index},"delta":{{{delta}}},"logprobs":', answer.finish_reason(sample)
    return chain([body], _logprobs(texts, sample.logprobs), [f",{end_members(end, sample.stop_reason)}}}"])


def _delta(delta: AnswerDelta, begins: bool) -> str:
    """Return the members of a chunk's `delta`."""
    if not (delta.reasoning or delta.tool_calls):
        return f'"content":{quoted(delta.content)}' if delta.content else ""
    members = []
    if delta.reasoning:
        members.append(f'"reasoning_content":{quoted(delta.reasoning)}')
    if delta.content:
        members.append(f'"content":{quoted(delta.content)}')
    elif begins:
        members.append('"content":null')
    if delta.tool_calls:
        members.append(f'"tool_calls":[{",".join(map(_call_piece, delta.tool_calls))}]')
    return ",".join(members)


def _call_piece(call: ToolCallDelta) -> str:
    arguments = quoted(call.arguments)
    if call.name is None:
        return f'{{"index":{call.index},"function":{{"arguments":{arguments}}}}}'
    function = f'{{"name":{quoted(call.name)},"arguments":{arguments}}}'
    return f'{{"index":{call.index},"id":"{call.id}","type":"function","function":{function}}}'


async def _whole(
    run: GenerationRun, answers: Sequence[ChatOutput], texts: TokenStrings | None, own: JsonObject
) -> Iterator[str]:
    choices: list[Iterator[str]] = []
    async for _, delta in run.deltas():
        if delta.output is None:
            continue
        for sample in delta.output.outputs:
            choices.append(_complete(sample, answers[sample.index], texts))
            # Parsing a long answer takes long: let other requests run in between.
            await asyncio.sleep(0)
        run.count_reasoning(answers, delta.output.outputs)
    return whole_body(own, choices, run.usage())


def _complete(sample: CompletionOutput, answer: ChatOutput, texts: TokenStrings | None) -> Iterator[str]:
    """Return the parts of a choice."""
    delta = answer.take(sample)
    message: JsonObject = {"role": "assistant", "content": delta.content, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        message["content"] = delta.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in delta.tool_calls
        ]
    body, end = f'{{"index":{sample.index},"message":{compact(message)},"logprobs":', answer.finish_reason(sample)
    return chain([body], _logprobs(texts, sample.logprobs), [f",{end_members(end, sample.stop_reason)}}}"])


def _logprobs(texts: TokenStrings | None, logprobs: Sequence[TokenLogprobs | None] | None) -> Iterable[str]:
    if texts is None or logprobs is None:
        return ("null",)
    return chain(['{"content":'], texts.chat_parts(logprobs), [',"refusal":null}'])
