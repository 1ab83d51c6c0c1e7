"""A server with OpenAI's protocol and no model: it says what a test tells it to, as late as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

TEMPLATE_TOKENS = 5
TOKENS_PER_WORD = 2


@dataclass
class FakeServer:
    """`fault` is asked of each request, by its number and body, what goes wrong: `429`, `broken`, `event`, `json`,
    `silent`, `empty` or nothing. With `gather`, answers begin when so many requests are there."""

    first_delay: float = 0.0
    token_delay: float = 0.0
    fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
    gather: int = 0
    counts_usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    base_url: str = ""

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        fault = self.fault(number, body)
        if fault == "429":
            error = {"message": "the queue is full", "type": "overloaded"}
            return JSONResponse({"error": error}, 429)
        if fault == "json":
            return JSONResponse({"choices": []})
        return StreamingResponse(self.stream(body, fault), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], fault: str | None) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for chunk in self.chunks(body, fault):
                yield chunk
        finally:
            self.running -= 1

    async def chunks(self, body: dict[str, Any], fault: str | None) -> AsyncIterator[str]:
        while len(self.bodies) < self.gather or fault == "silent":
            await asyncio.sleep(0.005)
        await asyncio.sleep(self.first_delay)
        if "messages" in body:
            yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        tokens = 0 if fault == "empty" else body["max_tokens"]
        for number in range(tokens):
            if number:
                await asyncio.sleep(self.token_delay)
            piece = f" t{number}"
            yield event(choices=[{"index": 0, "delta": {"content": piece}} if "messages" in body else {"text": piece}])
            if fault == "event":
                yield event(error={"message": "the step failed"})
            if fault == "broken":
                raise ConnectionError
        if self.counts_usage:
            yield event(choices=[], usage=usage(body, tokens))
        yield "data: [DONE]\n\n"


def usage(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    said = body["prompt"] if "prompt" in body else " ".join(each["content"] for each in body["messages"])
    return {
        "prompt_tokens": TEMPLATE_TOKENS + TOKENS_PER_WORD * len(said.split()),
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def event(**chunk: Any) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def fake_openai(**behaviour: Any) -> Iterator[FakeServer]:
    """Runs in a thread, on a loopback port of its own."""
    fake = FakeServer(**behaviour)
    app = FastAPI()
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.post(path)(fake.answer)
    app.get("/v1/models")(lambda: {"data": [{"id": "fake-model"}, {"id": "another"}]})
    listening = socket.create_server(("127.0.0.1", 0))
    fake.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
