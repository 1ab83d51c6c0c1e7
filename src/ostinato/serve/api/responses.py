"""`POST /v1/responses`: conversations answered in output items, and events of their growth. Nothing is stored."""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from fastapi import Request
from fastapi.responses import Response

from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.output_deltas import PackedLogprobs, SampleDelta
from ostinato.json_io import JsonObject
from ostinato.sampling.params import SamplingParams
from ostinato.scheduler.batch import TokenLogprobs
from ostinato.serve.api.generation_run import GenerationRun, ServedModel, in_slices, start_chat, whole_response
from ostinato.serve.api.responses_request import PreparedResponse, ResponsesRequest
from ostinato.serve.chat.answer_formats import AnswerDelta, AnswerLayout, ToolCallDelta
from ostinato.serve.chat.chat_output import ChatOutput, MessageLogprobs
from ostinato.serve.chat.text_support import ModelText, TokenStrings
from ostinato.serve.http.api_errors import ApiError, as_api_error
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.middleware import ApiRouter
from ostinato.serve.http.streaming import EventStream, LoopSlices


class Event(NamedTuple):
    """An event of the stream, without its sequence number."""

    type: str
    data: JsonObject


class ResponseItems:
    """Builder of items from an answer's deltas: reasoning, messages and calls, each complete before the next."""

    def __init__(self) -> None:
        self.items: list[JsonObject] = []
        """The complete items, and the one that grows, whose text is not in it yet."""
        self._text: list[str] = []
        self._logprobs: list[PackedLogprobs] = []
        self._is_open = False

    def take(self, delta: AnswerDelta, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[Event]:
        """Yield the events of a delta. `logprobs` belong to the tokens of its content, if they were requested."""
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.content:
            yield from self._grow("message", delta.content, logprobs)
        for call in delta.tool_calls:
            yield from self._grow_call(call)

    def end(self, status: str, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[Event]:
        """Yield the events of the end.

        The last item gets the response's `status`; an empty answer has one empty message. `logprobs` belong to the
        tokens that ended the answer; they go to the last item if it is a message.
        """
        if not self.items:
            yield from self._begin(_message())
        if logprobs and self.items[-1]["type"] == "message":
            yield from self._grow("message", "", logprobs)
        yield from self._close(status)

    @property
    def _at(self) -> JsonObject:
        """The position of the item that grows."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _grow(self, kind: str, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(_message() if kind == "message" else _reasoning())
        self._text.append(text)
        if kind == "message":
            self._logprobs.append(PackedLogprobs.of(logprobs))
            more = {"content_index": 0, "delta": text, "logprobs": self._logprobs[-1]}
            yield Event("response.output_text.delta", {**self._at, **more})
        else:
            yield Event("response.reasoning_text.delta", {**self._at, "content_index": 0, "delta": text})

    def _grow_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._close("completed")
            yield from self._begin(_call(call))
        if call.arguments:
            self._text.append(call.arguments)
            yield Event("response.function_call_arguments.delta", {**self._at, "delta": call.arguments})

    def _begin(self, item: JsonObject) -> Iterator[Event]:
        self.items.append(item)
        self._text, self._logprobs, self._is_open = [], [], True
        yield Event("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})
        if item["type"] != "function_call":
            yield Event(
                "response.content_part.added",
                {**self._at, "content_index": 0, "part": _part(item, "", PackedLogprobs())},
            )

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text, at = self.items[-1], "".join(self._text), self._at
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {**at, "name": item["name"], "arguments": text}
            yield Event("response.function_call_arguments.done", done)
        else:
            logprobs = PackedLogprobs.join(self._logprobs)
            part = _part(item, text, logprobs)
            item["content"] = [part]
            at["content_index"] = 0
            if item["type"] == "message":
                yield Event("response.output_text.done", {**at, "text": text, "logprobs": logprobs})
            else:
                yield Event("response.reasoning_text.done", {**at, "text": text})
            yield Event("response.content_part.done", {**at, "part": part})
        item["status"] = status
        self._is_open = False
        yield Event("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})


def _message() -> JsonObject:
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning() -> JsonObject:
    return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call(call: ToolCallDelta) -> JsonObject:
    return {
        "id": _id("fc"),
        "type": "function_call",
        "status": "in_progress",
        "call_id": call.id,
        "name": call.name,
        "arguments": "",
    }


def _part(item: JsonObject, text: str, logprobs: PackedLogprobs) -> JsonObject:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


_ECHO = secrets.token_hex(16)
"""Mark of the places of what is written in parts: as a member, of the client's echoed fields. No client knows it."""
_MARKS = re.compile(f'("{_ECHO}"(?::null)?)')


def responses_router(lifecycle: Lifecycle, served_model: Callable[[], ServedModel]) -> ApiRouter:
    router = ApiRouter()

    @router.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer text or items with items; nothing is stored."""
        model = served_model()
        prepared: PreparedResponse = request.state.prepared
        deadline = body.deadline(lifecycle.settings)
        run = await start_chat(model.engine, model.compiler, prepared.chat, body, deadline, request)
        parts = _ResponseOutput(model.text, prepared.chat.layout(model.text), prepared.chat.params)
        own = _response(f"resp_{request.state.request_id}", lifecycle.model_name)
        if body.stream:
            writer = _EventWriter(prepared.echo, model.text.token_texts)
            return EventStream(_events(run, parts, own, writer, model.slices), run.close)
        return await whole_response(request, run, _whole(run, parts, own, prepared.echo), model.slices)

    return router


def _response(response_id: str, model: str) -> JsonObject:
    """Return the response before its output begins."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
        _ECHO: None,
        "usage": None,  # last, where `ostinato route` reads it: an echo may be long, and say anything
    }


def _parts(data: Mapping[str, object], echo: Iterable[bytes], texts: TokenStrings) -> Iterator[str | bytes]:
    """Yield the parts of the JSON of data that may hold a response and log-probabilities.

    `echo`, the part that the client sent, is JSON already: it may be long, and must not be copied at once.
    """
    logprobs: list[PackedLogprobs] = []

    def mark(value: PackedLogprobs) -> str:
        logprobs.append(value)
        return _ECHO

    text = json.dumps(data, separators=(",", ":"), default=mark)
    following = iter(logprobs)
    for piece in _MARKS.split(text):
        if piece == f'"{_ECHO}"':
            yield from texts.chat_parts(next(following))
        elif piece == f'"{_ECHO}":null':
            yield from echo
        else:
            yield piece


def _ended(response: JsonObject, items: ResponseItems, output: CompletionOutput, run: GenerationRun) -> JsonObject:
    """Return the response once its output has ended."""
    # OpenAI's API has one reason for both limits, and no field that tells them apart.
    limit = {"reason": "max_output_tokens", "stop_reason": output.stop_reason}
    usage = run.usage()
    return {
        **response,
        "status": _status(output),
        "incomplete_details": limit if output.finish_reason == "length" else None,
        "output": items.items,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": run.num_created_tokens,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": run.reasoning_tokens or 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _status(output: CompletionOutput) -> str:
    return "incomplete" if output.finish_reason == "length" else "completed"


class _ResponseOutput:
    """Output of a response as items, with the log-probabilities of its messages if these were requested."""

    def __init__(self, text: ModelText, layout: AnswerLayout, params: SamplingParams) -> None:
        self.items = ResponseItems()
        self.texts = text.token_texts
        self.answer = ChatOutput(text, layout)
        self._logprobs = None
        if params.logprobs is not None:
            self._logprobs = MessageLogprobs(text, params.skip_special_tokens, layout.is_plain)

    def take(self, piece: SampleDelta | CompletionOutput) -> Iterator[Event]:
        """Yield the events of the next piece of the output."""
        delta = self.answer.take(piece)
        return self.items.take(delta, () if self._logprobs is None else self._logprobs.take(piece, delta))

    def end(self, output: CompletionOutput) -> Iterator[Event]:
        """Yield the events of the output's end."""
        return self.items.end(_status(output), () if self._logprobs is None else self._logprobs.rest())


async def _whole(
    run: GenerationRun, parts: _ResponseOutput, response: JsonObject, echo: Sequence[bytes]
) -> Iterator[str | bytes]:
    async for _, delta in run.deltas():
        if delta.output is not None:
            [output] = delta.output.outputs
            for _event in chain(parts.take(output), parts.end(output)):
                pass
            run.count_reasoning([parts.answer], [output])
            response = _ended(response, parts.items, output, run)
    return _parts(response, echo, parts.texts)


async def _events(
    run: GenerationRun, parts: _ResponseOutput, response: JsonObject, writer: _EventWriter, slices: LoopSlices
) -> AsyncGenerator[bytes]:
    opening = {"response": response}
    beginning = [Event("response.created", opening), Event("response.in_progress", opening)]
    async for piece in in_slices(slices, [writer.parts(beginning)], is_last=False):
        yield piece
    try:
        async for _, delta in run.deltas():
            events: list[Event] = []
            for sample in delta.samples:
                events += parts.take(sample)
                if sample.logprobs is not None:  # they are repeated at the end
                    run.streams[0].hold(sample.logprobs.num_bytes)
            if delta.output is not None and delta.output.error is None:
                [output] = delta.output.outputs
                events += parts.end(output)
                run.count_reasoning([parts.answer], [output])
                ended = _ended(response, parts.items, output, run)
                events.append(Event(f"response.{ended['status']}", {"response": ended}))
            async for piece in in_slices(slices, [writer.parts(events)], run.has_ended):
                yield piece
    except Exception as error:
        failed = _failed(response, parts.items, as_api_error(error))
        async for piece in in_slices(slices, [writer.parts([Event("response.failed", {"response": failed})])], False):
            yield piece
        raise


def _failed(response: JsonObject, items: ResponseItems, error: ApiError) -> JsonObject:
    reason = {"code": "server_error", "message": error.message}
    return {**response, "status": "failed", "error": reason, "output": items.items}


class _EventWriter:
    """Writer that numbers events and serialises them."""

    def __init__(self, echo: Sequence[bytes], texts: TokenStrings) -> None:
        self._echo, self._texts = echo, texts
        self._number = 0

    def parts(self, events: Iterable[Event]) -> Iterator[str | bytes]:
        """Yield the parts of the events."""
        for event in events:
            data = {"type": event.type, "sequence_number": self._number, **event.data}
            self._number += 1
            yield f"event: {event.type}\ndata: "
            yield from _parts(data, self._echo, self._texts)
            yield "\n\n"
