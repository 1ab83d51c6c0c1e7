"""`POST /v1/responses`: conversations answered in items, of which nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.delivery import SampleDelta
from ostinato.sample.params import SamplingParams
from ostinato.serve.chat.answers import Run, answer
from ostinato.serve.chat.conversation import AnswerForm, Asked, Conversation, begin, checked_tools, described
from ostinato.serve.chat.message_logprobs import MessageLogprobs
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.chat.response_items import Event, Items
from ostinato.serve.chat.split import Answer
from ostinato.serve.chunks import compact
from ostinato.serve.http.errors import ApiError, as_api_error
from ostinato.serve.http.life import Life
from ostinato.serve.protocol.conversation import template_kwargs
from ostinato.serve.protocol.guides import one_wish, wishes_of
from ostinato.serve.protocol.input_items import template_messages
from ostinato.serve.protocol.responses import ResponsesRequest
from ostinato.serve.streaming import Last


def responses_router(life: Life, text_of: Callable[[AsyncEngine], ModelText]) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        engine = life.engine
        text = text_of(engine)
        body.check(life.settings, life.model_name)
        engine.admission.check(1)
        wish = one_wish([body.format_wish(), *wishes_of(body)])
        tools = checked_tools(text, body.nested_tools(), body.nested_choice(), nested=False)
        effort = None if body.reasoning is None else body.reasoning.effort
        messages, places = template_messages(body.input, body.instructions, text.knows_developer)
        conversation = Conversation(
            messages,
            [described(tool) for tool in tools] or None,
            template_kwargs(body.chat_template_kwargs, effort),
            add_generation_prompt=True,
            continue_final_message=False,
            places=places,
        )
        more = {"max_tokens": body.max_output_tokens, **text.shows_tags(body.skip_special_tokens)}
        if (logprobs := body.num_logprobs()) is not None:
            more["logprobs"] = logprobs
        params = body.sampling(engine.default_params, **more)
        asked = Asked(conversation, tools, body.nested_choice(), body.parallel_tool_calls is not False, wish, "input")
        deadline = body.deadline(life.settings)
        run, form = await begin(engine, text, asked, params, body, deadline, request.state.record)
        parts = _Parts(text, form, params)
        own = _response(body, params, f"resp_{request.state.request_id}", life.model_name)
        return await answer(
            request, run, body.stream, lambda: _events(run, parts, own), lambda: _whole(run, parts, own)
        )

    return router


def _response(body: ResponsesRequest, params: SamplingParams, response_id: str, model: str) -> dict[str, Any]:
    """The response before it has begun."""
    text_format = None if body.text is None else body.text.format
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": False,
        "background": False,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"} if text_format is None else text_format.model_dump(exclude_none=True)},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": "disabled",
    }


def _ended(response: dict[str, Any], items: Items, output: CompletionOutput, run: Run) -> dict[str, Any]:
    """The response once its output has ended."""
    is_cut = output.finish_reason == "length"
    usage = run.usage()
    return {
        **response,
        "status": _status(output),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items.items,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": run.reasoning_tokens or 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _status(output: CompletionOutput) -> str:
    return "incomplete" if output.finish_reason == "length" else "completed"


class _Parts:
    """An answer taken apart into items, with the log-probabilities of its messages if these were asked for."""

    def __init__(self, text: ModelText, form: AnswerForm, params: SamplingParams) -> None:
        self.items = Items()
        self._answer = Answer(text, form)
        self._logprobs = None
        if params.logprobs is not None:
            self._logprobs = MessageLogprobs(text, params.skip_special_tokens, form.is_plain)

    def take(self, piece: SampleDelta | CompletionOutput) -> Iterator[Event]:
        """What the next piece of the output changes."""
        delta = self._answer.take(piece)
        return self.items.take(delta, () if self._logprobs is None else self._logprobs.take(piece, delta))

    def end(self, output: CompletionOutput) -> Iterator[Event]:
        """What its end changes."""
        return self.items.end(_status(output), () if self._logprobs is None else self._logprobs.rest())

    def reasoning_tokens(self, output: CompletionOutput) -> int:
        return self._answer.reasoning_tokens(output.token_ids)


async def _whole(run: Run, parts: _Parts, response: dict[str, Any]) -> str:
    async for _, delta in run.deltas():
        if delta.output is not None:
            [output] = delta.output.outputs
            for _event in chain(parts.take(output), parts.end(output)):
                pass
            run.reasoning_tokens = parts.reasoning_tokens(output)
            response = _ended(response, parts.items, output, run)
    return compact(response)


async def _events(run: Run, parts: _Parts, response: dict[str, Any]) -> AsyncGenerator[bytes]:
    lines = _Lines()
    opening = {"response": response}
    yield lines.of([Event("response.created", opening), Event("response.in_progress", opening)])
    try:
        async for _, delta in run.deltas():
            events: list[Event] = []
            for sample in delta.samples:
                events += parts.take(sample)
            if delta.output is not None and delta.output.error is None:
                [output] = delta.output.outputs
                events += parts.end(output)
                run.reasoning_tokens = parts.reasoning_tokens(output)
                ended = _ended(response, parts.items, output, run)
                events.append(Event(f"response.{ended['status']}", {"response": ended}))
            if run.has_ended:
                yield Last(lines.of(events))
            elif events:
                yield lines.of(events)
    except Exception as error:
        yield lines.of([Event("response.failed", {"response": _failed(response, parts.items, as_api_error(error))})])
        raise


def _failed(response: dict[str, Any], items: Items, error: ApiError) -> dict[str, Any]:
    reason = {"code": "server_error", "message": error.message}
    return {**response, "status": "failed", "error": reason, "output": items.items}


class _Lines:
    """Events as they are sent, numbered."""

    def __init__(self) -> None:
        self._number = 0

    def of(self, events: Iterable[Event]) -> bytes:
        parts = []
        for event in events:
            data = {"type": event.type, "sequence_number": self._number, **event.data}
            parts.append(f"event: {event.type}\ndata: {compact(data)}\n\n")
            self._number += 1
        return "".join(parts).encode()
