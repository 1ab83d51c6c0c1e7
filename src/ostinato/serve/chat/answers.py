"""What answers of all endpoints share: running a request's prompts, and counting its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ostinato.engine.process.async_engine import AsyncEngine
from ostinato.engine.process.delivery import OutputDelta
from ostinato.engine.process.stream import Stream
from ostinato.media.prompt import MediaPrompt
from ostinato.observe.record import RequestRecord
from ostinato.sample.guide import Guide
from ostinato.sample.params import SamplingParams
from ostinato.serve.chunks import Json
from ostinato.serve.protocol.common import Generating
from ostinato.serve.streaming import EventStream, unless_gone


async def answer(
    request: Request,
    run: Run,
    stream: bool | None,
    events: Callable[[], AsyncIterator[bytes]],
    whole: Callable[[], Coroutine[Any, Any, str | bytes]],
) -> Response:
    """The response that `run`, which ends with it, gives: events as they come, or JSON once it is whole."""
    if stream:
        return EventStream(events(), run.close)
    try:
        return Json(await unless_gone(request, whole()))
    finally:
        run.close()


def head(prefix: str, kind: str, request_id: str, model: str) -> dict[str, Any]:
    """What every part of an answer begins with."""
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


class Run:
    """The streams of one HTTP request, one per prompt, and the tokens that they have so far."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = streams
        self.completion_tokens = 0
        self._num_ended = 0
        self.reasoning_tokens: int | None = None
        """Those of completion_tokens that are reasoning; None where nothing is known of reasoning."""

    @classmethod
    async def begin(
        cls,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        body: Generating,
        deadline: float,
        record: RequestRecord,
        guide: Guide | None = None,
        media: MediaPrompt | None = None,
    ) -> Run:
        """Submits every prompt, as token ids, for the request of `record`; if one is refused, none runs, and its error
        is raised. `media` is that of the only prompt."""
        if guide is not None:
            params = params.replace(guide=guide)
        streams: list[Stream] = []
        record.streams = streams
        try:
            for prompt in prompts:
                streams.append(
                    await engine.submit(
                        prompt,
                        params,
                        priority=body.priority,
                        cache_salt=body.cache_salt,
                        media=media,
                        deadline=deadline,
                    )
                )
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return cls(streams)

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """(place of the prompt, what it gained), as they come."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield 0, self._counted(delta)
            return
        news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(maxsize=len(self.streams))
        tasks = [asyncio.create_task(_forward(place, stream, news)) for place, stream in enumerate(self.streams)]
        try:
            running = len(tasks)
            while running:
                item = await news.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item[0], self._counted(item[1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def has_ended(self) -> bool:
        """Whether `deltas` has given all that there is, and no error comes behind it."""
        return self._num_ended == len(self.streams)

    def close(self) -> None:
        """Ends what is unfinished."""
        for stream in self.streams:
            stream.abort()

    def usage(self, without_output: bool = False) -> dict[str, Any]:
        """OpenAI's `usage`; `without_output` where the tokens of output were not asked for."""
        completion_tokens = 0 if without_output else self.completion_tokens
        prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self.streams)
        cached = sum(stream.num_cached_tokens or 0 for stream in self.streams)
        details = {} if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": details or None,
        }

    def _counted(self, delta: OutputDelta) -> OutputDelta:
        self.completion_tokens += sum(len(sample.token_ids) for sample in delta.samples)
        self._num_ended += delta.output is not None and delta.output.error is None
        return delta


async def _forward(
    place: int, stream: Stream, news: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None]
) -> None:
    try:
        async for delta in stream:
            await news.put((place, delta))
    except Exception as error:
        await news.put(error)
    else:
        await news.put(None)
