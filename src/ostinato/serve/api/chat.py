"""`POST /v1/chat/completions`: conversations answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostinato.engine.outputs import CompletionOutput
from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.delivery import SampleDelta
from ostinato.schedule.batch import TokenLogprobs
from ostinato.serve.chat.answers import Run, answer, head
from ostinato.serve.chat.conversation import Asked, begin, checked_tools, conversation_of
from ostinato.serve.chat.model_text import ModelText
from ostinato.serve.chat.split import Answer
from ostinato.serve.chat.token_texts import TokenTexts
from ostinato.serve.chunks import Chunks, Whole, compact, quoted
from ostinato.serve.http.life import Life
from ostinato.serve.parsing.answer import AnswerDelta, ToolCallDelta
from ostinato.serve.protocol.chat import ChatRequest
from ostinato.serve.protocol.guides import format_wish, one_wish, wishes_of
from ostinato.serve.streaming import DONE, Last


def chat_router(life: Life, text_of: Callable[[AsyncEngine], ModelText]) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        engine = life.engine
        text = text_of(engine)
        body.check(life.settings, life.model_name)
        engine.admission.check(body.n or 1)
        wish = one_wish([format_wish(body.response_format), *wishes_of(body)])
        tools = checked_tools(text, body.tools, body.tool_choice)
        conversation = conversation_of(text, body, tools)
        more = {"max_tokens": body.max_output(), **text.shows_tags(body.skip_special_tokens)}
        if (logprobs := body.num_logprobs()) is not None:
            more["logprobs"] = logprobs
        params = body.sampling(engine.default_params, **more)
        asked = Asked(conversation, tools, body.tool_choice, body.parallel_tool_calls is not False, wish, "messages")
        deadline = body.deadline(life.settings)
        run, form = await begin(engine, text, asked, params, body, deadline, request.state.record)
        answers = [Answer(text, form) for _ in range(params.n)]
        texts = None if logprobs is None else text.token_texts
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        own = head("chatcmpl", kind, request.state.request_id, life.model_name)
        return await answer(
            request,
            run,
            body.stream,
            lambda: _events(run, answers, texts, Chunks(own, body.include_usage), body.include_usage),
            lambda: _whole(run, answers, texts, Whole(own)),
        )

    return router


async def _events(
    run: Run, answers: Sequence[Answer], texts: TokenTexts | None, chunks: Chunks, include_usage: bool
) -> AsyncGenerator[bytes]:
    begun: set[int] = set()
    end = ""
    async for _, delta in run.deltas():
        events = []
        for sample in delta.samples:
            index = sample.sample_index
            choice = _streamed(sample, answers[index], texts, begins=index not in begun)
            if choice is not None:
                begun.add(index)
                events.append(chunks.event(choice))
        if delta.output is not None:
            _count_reasoning(run, answers, delta.output.outputs)
        if run.has_ended:
            end = "".join(events)
        elif events:
            yield "".join(events).encode()
    if include_usage:
        end += chunks.usage(run.usage())
    yield Last(end.encode() + DONE)


def _streamed(sample: SampleDelta, answer: Answer, texts: TokenTexts | None, begins: bool) -> str | None:
    """A chunk's choice; None if there is nothing to say."""
    delta = _delta(answer.take(sample), begins)
    if not (delta or sample.finish_reason or (texts is not None and sample.logprobs)):
        return None
    if begins:
        delta = f'"role":"assistant",{delta}' if delta else '"role":"assistant","content":""'
    logprobs, reason = _logprobs(texts, sample.logprobs), _quoted(answer.finish_reason(sample))
    index = sample.sample_index
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{reason}}}'


def _delta(delta: AnswerDelta, begins: bool) -> str:
    """The members of a chunk's delta."""
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


async def _whole(run: Run, answers: Sequence[Answer], texts: TokenTexts | None, whole: Whole) -> bytes:
    choices: list[str] = []
    async for _, delta in run.deltas():
        if delta.output is None:
            continue
        for sample in delta.output.outputs:
            choices.append(_complete(sample, answers[sample.index], texts))
            # Many log-probabilities take long: others have their turn between two outputs.
            await asyncio.sleep(0)
        _count_reasoning(run, answers, delta.output.outputs)
    return whole.body(choices, run.usage())


def _complete(sample: CompletionOutput, answer: Answer, texts: TokenTexts | None) -> str:
    delta = answer.take(sample)
    message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        message["content"] = delta.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in delta.tool_calls
        ]
    logprobs, reason = _logprobs(texts, sample.logprobs), _quoted(answer.finish_reason(sample))
    return f'{{"index":{sample.index},"message":{compact(message)},"logprobs":{logprobs},"finish_reason":{reason}}}'


def _count_reasoning(run: Run, answers: Sequence[Answer], outputs: Sequence[CompletionOutput]) -> None:
    run.reasoning_tokens = sum(answers[output.index].reasoning_tokens(output.token_ids) for output in outputs)


def _logprobs(texts: TokenTexts | None, logprobs: Sequence[TokenLogprobs] | None) -> str:
    if texts is None or logprobs is None:
        return "null"
    return f'{{"content":{texts.chat_json(logprobs)},"refusal":null}}'


def _quoted(reason: str | None) -> str:
    return "null" if reason is None else f'"{reason}"'
