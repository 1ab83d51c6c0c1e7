"""`POST /v1/completions`: text continued."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ostinato.serve.answers import Run
from ostinato.serve.life import Life
from ostinato.serve.protocol.completions import CompletionRequest
from ostinato.serve.streaming import DONE, EventStream, event, unless_gone


def completions_router(life: Life) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        engine, prompts = life.engine, body.prompts()
        body.check(life.settings, life.model_name, len(prompts))
        params = body.sampling(engine.engine.default_params(), max_tokens=body.max_tokens)
        run = await Run.begin(engine, prompts, params, body, body.deadline(life.settings))
        head = {
            "id": f"cmpl-{request.state.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": life.model_name,
        }
        if body.stream:
            return EventStream(_events(run, head, params.n, body.include_usage), run.close)
        try:
            return JSONResponse(await unless_gone(request, _whole(run, head, params.n)))
        finally:
            run.close()

    return router


async def _events(run: Run, head: dict[str, Any], n: int, include_usage: bool) -> AsyncIterator[bytes]:
    more = {"usage": None} if include_usage else {}
    async for place, delta in run.deltas():
        choices = [
            {
                "index": place * n + sample.sample_index,
                "text": sample.text,
                "logprobs": None,
                "finish_reason": sample.finish_reason,
            }
            for sample in delta.samples
            if sample.text or sample.finish_reason
        ]
        for choice in choices:
            yield event({**head, "choices": [choice], **more})
    if include_usage:
        yield event({**head, "choices": [], "usage": run.usage()})
    yield DONE


async def _whole(run: Run, head: dict[str, Any], n: int) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    async for place, delta in run.deltas():
        if delta.output is not None:
            for sample in delta.output.outputs:
                index = place * n + sample.index
                choices[index] = {
                    "index": index,
                    "text": sample.text,
                    "logprobs": None,
                    "finish_reason": sample.finish_reason,
                }
    return {**head, "choices": [choices[index] for index in sorted(choices)], "usage": run.usage()}
