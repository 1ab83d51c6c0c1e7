"""`POST /v1/messages` and `/v1/messages/count_tokens`: conversations answered in Anthropic's form.

An answer has content blocks, and events that report their growth.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from fastapi import Request
from fastapi.responses import Response

from ostinato.engine.outputs import CompletionOutput
from ostinato.json_io import JsonObject
from ostinato.plan.plan import Plan
from ostinato.scheduler.request import CONTEXT_END
from ostinato.serve.api.anthropic_request import CountTokensRequest, MessagesRequest
from ostinato.serve.api.generation_run import (
    GenerationRun,
    PreparedChat,
    ServedModel,
    compact,
    quoted,
    start_chat,
    whole_response,
)
from ostinato.serve.chat.answer_formats import AnswerDelta, ToolCallDelta
from ostinato.serve.chat.chat_output import ChatOutput, arguments_of
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import EventStream, LastEvents

_GROWS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
"""Type of a block -> that of its deltas, and the field that holds the text in both."""


def event(kind: str, data: str = "") -> str:
    """Return an event in wire form; `data` are JSON members with a leading comma."""
    return f'event: {kind}\ndata: {{"type":"{kind}"{data}}}\n\n'


class MessageBlocks:
    """Builder of blocks from an answer's deltas: thinking, text and calls, each complete before the next."""

    def __init__(self) -> None:
        self.blocks: list[JsonObject] = []
        """The complete blocks, and the one that grows, whose text is not in it yet."""
        self._text: list[str] = []
        self._is_open = False

    def take(self, delta: AnswerDelta) -> str:
        """Return the events of a delta."""
        events = ""
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        for call in delta.tool_calls:
            events += self._grow_call(call)
        return events

    def end(self) -> str:
        """Return the events that end the last block."""
        if not self._is_open:
            return ""
        block, text = self.blocks[-1], "".join(self._text)
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        else:
            block[_GROWS[block["type"]][1]] = text
        self._is_open = False
        return event("content_block_stop", f',"index":{len(self.blocks) - 1}')

    def _grow(self, kind: str, text: str) -> str:
        events = ""
        if not self._is_open or self.blocks[-1]["type"] != kind:
            block = {"type": "text", "text": ""} if kind == "text" else _thinking()
            events = self.end() + self._begin(block)
        of_delta, name = _GROWS[kind]
        return events + self._delta(of_delta, name, text)

    def _grow_call(self, call: ToolCallDelta) -> str:
        events = ""
        if call.name is not None:
            call_id = f"toolu_{(call.id or '').removeprefix('call_')}"
            events = self.end() + self._begin({"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
        if call.arguments:
            events += self._delta("input_json_delta", "partial_json", call.arguments)
        return events

    def _begin(self, block: JsonObject) -> str:
        self.blocks.append(block)
        self._text, self._is_open = [], True
        return event("content_block_start", f',"index":{len(self.blocks) - 1},"content_block":{compact(block)}')

    def _delta(self, kind: str, name: str, text: str) -> str:
        self._text.append(text)
        delta = f'{{"type":"{kind}","{name}":{quoted(text)}}}'
        return event("content_block_delta", f',"index":{len(self.blocks) - 1},"delta":{delta}')


def _thinking() -> JsonObject:
    return {"type": "thinking", "thinking": "", "signature": ""}


def messages_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter("/v1/messages", dialect="anthropic")

    @router.post("", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's form; with `stream`, in its events."""
        model = served_model()
        prepared = _with_possible_marks(request.state.prepared, model.engine.plan)
        deadline = body.deadline(lifecycle.settings)
        run = await start_chat(model.engine, model.compiler, prepared, body, deadline, request)
        written = _Message(
            run,
            ChatOutput(model.text, prepared.layout(model.text)),
            f"msg_{request.state.request_id}",
            lifecycle.model_name,
            model.engine.plan.hit_law.block_size,
        )
        if body.stream:
            return EventStream(written.events(), run.close)
        return await whole_response(request, run, written.whole(), model.slices)

    @router.post("/count_tokens", response_model=dict[str, int])
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:  # noqa: ARG001
        """Return the number of tokens in the prompt of these messages."""
        return Response(request.state.prepared, media_type="application/json")

    return router


def _with_possible_marks(prepared: PreparedChat, plan: Plan) -> PreparedChat:
    """Return a conversation whose marks the engine takes; what it drops or shortens is named among the missing ones.

    Clients of this API send marks unasked, so they are no error where nothing is kept, or not for so long.
    """
    if plan.hit_law.min_shared == 0:
        return replace(prepared, marks={}, missing_marks=(*prepared.missing_marks, *prepared.marks))
    max_ttl = plan.pins.max_ttl
    shortened = [place for place, mark in prepared.marks.items() if mark.ttl > max_ttl]
    if not shortened:
        return prepared
    marks = {place: replace(mark, ttl=min(mark.ttl, max_ttl)) for place, mark in prepared.marks.items()}
    fields = [place if place == "cache_control" else f"{place}.cache_control" for place in shortened]
    missing = (*prepared.missing_marks, *(f"{place}.ttl" for place in fields))
    return replace(prepared, marks=marks, missing_marks=missing)


class _Message:
    """One answer while it grows."""

    def __init__(self, run: GenerationRun, output: ChatOutput, message_id: str, model: str, block_size: int) -> None:
        self._run, self._output, self._block_size = run, output, block_size
        self._blocks = MessageBlocks()
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of a stream.

        The first comes with the first token, since the number of cached tokens is not known earlier.
        """
        begun = False
        async for _, delta in self._run.deltas():
            events = ""
            if not begun:
                begun = True
                opening = {**self._head, "content": [], **_ending(None, None), "usage": self._usage(0)}
                events += event("message_start", f',"message":{compact(opening)}')
            for sample in delta.samples:
                events += self._blocks.take(self._output.take(sample))
            if delta.output is not None and delta.output.error is None:
                [whole] = delta.output.outputs
                events += self._blocks.end()
                self._run.count_reasoning([self._output], [whole])
                ending, usage = compact(self._ending(whole)), compact(self._usage())
                events += event("message_delta", f',"delta":{ending},"usage":{usage}') + event("message_stop")
            if self._run.has_ended:
                yield LastEvents(events.encode())
            elif events:
                yield events.encode()

    async def whole(self) -> list[str]:
        """Return the whole message as JSON, in one part."""
        ending: JsonObject = {}
        async for _, delta in self._run.deltas():
            if delta.output is not None:
                [whole] = delta.output.outputs
                self._blocks.take(self._output.take(whole))
                self._blocks.end()
                self._run.count_reasoning([self._output], [whole])
                ending = self._ending(whole)
        return [compact({**self._head, "content": self._blocks.blocks, **ending, "usage": self._usage()})]

    def _ending(self, output: CompletionOutput) -> JsonObject:
        """Return why the answer ended. The output must have been taken before."""
        reason = self._output.finish_reason(output)
        if reason == "tool_calls":
            return _ending("tool_use", None)
        if reason == "length":
            is_full = output.stop_reason == CONTEXT_END
            return _ending("model_context_window_exceeded" if is_full else "max_tokens", None)
        if isinstance(output.stop_reason, str):
            return _ending("stop_sequence", output.stop_reason)
        return _ending("end_turn", None)

    def _usage(self, output_tokens: int | None = None) -> JsonObject:
        """Return Anthropic's usage; its `input_tokens` are those after the hit and the last mark.

        Marks are named if they cannot be located, or are not pinned, and their times if they were shortened.
        """
        usage = self._run.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        created, unpinned = self._run.num_created_tokens, self._run.streams[0].unpinned_marks
        not_kept = [place for place, mark in self._run.marks.items() if mark.boundary(self._block_size) in unpinned]
        not_kept += self._run.missing_marks
        thinking = self._run.reasoning_tokens
        return {
            "input_tokens": usage["prompt_tokens"] - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"] if output_tokens is None else output_tokens,
            "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
            **({"cache_control_not_kept": not_kept} if not_kept else {}),
        }


def _ending(reason: str | None, sequence: str | None) -> JsonObject:
    return {"stop_reason": reason, "stop_sequence": sequence}
