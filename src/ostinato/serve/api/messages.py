"""`POST /v1/messages`: conversations answered, in Anthropic's form; and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostinato.engine.outputs import CompletionOutput
from ostinato.serve.api.answers import PreparedChat, GenerationRun, make_response, compact, start_chat
from ostinato.serve.api.message_blocks import MessageBlocks, event
from ostinato.serve.api.message_input import CountTokensRequest, MessagesRequest
from ostinato.serve.chat.output import ChatOutput
from ostinato.serve.http.lifecycle import Lifecycle
from ostinato.serve.http.streaming import LastEvents
from ostinato.serve.work.model import ServedModel


def messages_router(lifecycle: Lifecycle, models: Callable[[], ServedModel]) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        model = models()
        prepared: PreparedChat = request.state.prepared
        deadline = body.deadline(lifecycle.settings)
        run = await start_chat(model.engine, model.compiler, prepared, body, deadline, request)
        written = _Message(
            run,
            ChatOutput(model.text, prepared.form(model.text)),
            prepared.params.max_tokens,
            f"msg_{request.state.request_id}",
            lifecycle.model_name,
        )
        return await make_response(request, run, body.stream, written.events, written.whole)

    @router.post("/v1/messages/count_tokens", response_model=dict[str, int])
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:  # noqa: ARG001
        """Return the number of tokens in the prompt of these messages."""
        return Response(request.state.prepared, media_type="application/json")

    return router


class _Message:
    """One answer while it grows."""

    def __init__(self, run: GenerationRun, output: ChatOutput, max_tokens: int | None, message_id: str, model: str) -> None:
        self._run, self._output, self._max_tokens = run, output, max_tokens
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
                self._count_reasoning(whole)
                ending, usage = compact(self._ending(whole)), compact(self._usage())
                events += event("message_delta", f',"delta":{ending},"usage":{usage}') + event("message_stop")
            if self._run.has_ended:
                yield LastEvents(events.encode())
            elif events:
                yield events.encode()

    async def whole(self) -> str:
        """Return the whole message as JSON."""
        ending: dict[str, Any] = {}
        async for _, delta in self._run.deltas():
            if delta.output is not None:
                [whole] = delta.output.outputs
                self._blocks.take(self._output.take(whole))
                self._blocks.end()
                self._count_reasoning(whole)
                ending = self._ending(whole)
        return compact({**self._head, "content": self._blocks.blocks, **ending, "usage": self._usage()})

    def _count_reasoning(self, output: CompletionOutput) -> None:
        self._run.reasoning_tokens = self._output.reasoning_tokens(output.token_ids)

    def _ending(self, output: CompletionOutput) -> dict[str, Any]:
        """Return why the answer ended. The output must have been taken before."""
        reason = self._output.finish_reason(output)
        if reason == "tool_calls":
            return _ending("tool_use", None)
        if reason == "length":
            is_asked = self._max_tokens is not None and len(output.token_ids) >= self._max_tokens
            return _ending("max_tokens" if is_asked else "model_context_window_exceeded", None)
        if isinstance(output.stop_reason, str):
            return _ending("stop_sequence", output.stop_reason)
        return _ending("end_turn", None)

    def _usage(self, output_tokens: int | None = None) -> dict[str, Any]:
        """Return Anthropic's usage; its `input_tokens` are those that the prefix cache did not have."""
        usage = self._run.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thinking = self._run.reasoning_tokens
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"] if output_tokens is None else output_tokens,
            "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
        }


def _ending(reason: str | None, sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence}
