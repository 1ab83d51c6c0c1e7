"""A server with OpenAI's protocol that is not ours, and none that we use: bytes on a socket, with the habits of many.

What it sends is written out here, so that nothing of the load generator's own code decides what is right.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.patience import PATIENCE

HEAD = (
    "HTTP/1.1 200\r\nServer: other/1.0\r\nContent-type: Text/Event-Stream ; charset=UTF-8\r\n"
    "TRANSFER-ENCODING: chunked\r\nX-Empty:\r\n\r\n"
)
TEXTS = (" één", " two", " three", " four")


@dataclass
class Quirky:
    """`quirk` is what the server does with a request of its number: a name in `_body` or `_refusal`, or "" for nothing
    beyond its usual habits."""

    quirk: Callable[[int], str]
    cut: int = 0
    """Bytes of a packet; 0: all at once."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    base_url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.answer(reader, writer):
                pass
        writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is kept."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            models = json.dumps({"object": "list", "data": [{"id": "other", "object": "model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
            return True
        length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        number = len(self.bodies)
        self.bodies.append(body)
        quirk = self.quirk(number)
        if (refusal := _refusal(quirk)) is not None:
            writer.write(refusal)
            return True
        head = f"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n{HEAD}" if quirk == "early_hints" else HEAD
        if quirk == "http_1_0":
            data = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + _body(body, quirk)
        else:
            data = head.encode() + _chunked(_body(body, quirk), ends=quirk not in ("no_last_chunk", "reset"))
        await self.write(writer, data)
        if quirk == "reset":
            writer.transport.abort()
        return quirk not in ("http_1_0", "no_last_chunk", "reset")

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """In packets that end anywhere: inside characters, line ends, events and lengths of chunks."""
        step = self.cut or len(data)
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)


def _refusal(quirk: str) -> bytes | None:
    error = {"error": {"message": "slow down", "type": "requests", "param": None, "code": "rate_limit_exceeded"}}
    if quirk == "429":
        data = json.dumps(error).encode()
        return b"HTTP/1.1 429 \r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    if quirk == "moved":
        return b"HTTP/1.1 308 Permanent Redirect\r\nLocation: /v2/completions\r\nContent-Length: 0\r\n\r\n"
    return None


def _body(asked: dict[str, Any], quirk: str) -> bytes:
    """Events, with what this server thinks of line ends."""
    chat = "messages" in asked

    def choice(text: str | None, **more: Any) -> dict[str, Any]:
        said = {"delta": {"content": text}} if chat else {"text": text}
        return {"index": 0, "logprobs": None, "finish_reason": None, **said, **more}

    def chunk(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({'id': 'x', 'choices': list(choices), **more}, ensure_ascii=False)}"

    texts = TEXTS[: asked["max_tokens"]]
    events = [": a comment", "retry: 3000", chunk(prompt_filter_results=[]), "data:", ":"]
    if chat:
        events.append(chunk({"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}))
    events += [f"id: {number}\r\n{chunk(choice(text), usage=None)}" for number, text in enumerate(texts)]
    events.append(chunk(choice(None if chat else "", finish_reason="length")))
    middle = len(events) - 2
    if quirk == "error":
        events.insert(middle, 'data: {"error": {"message": "out of memory", "code": 500}}')
    if quirk == "error_object":
        events.insert(middle, 'data: {"object": "error", "message": "out of memory", "type": "Internal", "code": 500}')
    if quirk == "error_event":
        events.insert(middle, 'event: error\r\ndata: {"message": "out of memory"}')
    if quirk == "parts":
        events.insert(middle, chunk(choice([{"type": "text", "text": "x"}])))  # type: ignore[arg-type]
    if quirk == "odd_usage":
        events.insert(middle, chunk(usage=[1, 2]))
    if quirk == "reset":
        return "\r\n\r\n".join(events[:middle]).encode()
    if (asked.get("stream_options") or {}).get("include_usage") and quirk != "no_usage":
        said = len(asked["prompt"].split() if "prompt" in asked else asked["messages"][-1]["content"].split())
        counts = {"prompt_tokens": 2 * said + 3, "completion_tokens": len(texts), "prompt_tokens_details": None}
        events.append(chunk(usage=counts))
    events.append("data:[DONE]")
    ends = "" if quirk in ("no_last_line", "http_1_0") else "\r\n" if quirk == "no_blank_line" else "\r\n\r\n"
    return ("\r\n\r\n".join(events) + ends).encode()


def _chunked(data: bytes, ends: bool) -> bytes:
    """In chunks that end inside events, with extensions and a trailer."""
    parts = [data[start : start + 33] for start in range(0, len(data), 33)]
    chunks = b"".join(b"%X;n=1\r\n%b\r\n" % (len(part), part) for part in parts)
    return chunks + b"0\r\nX-Trailer: 1\r\n\r\n" if ends else chunks


@contextmanager
def quirky_openai(quirk: Callable[[int], str] = lambda number: "", cut: int = 0) -> Iterator[Quirky]:
    """Runs in a thread, on a loopback port of its own."""
    quirky = Quirky(quirk, cut)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(quirky.serve, "127.0.0.1", 0))
    quirky.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield quirky
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
